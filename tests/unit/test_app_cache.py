"""What clients see of cache and queue: counts, salts, priorities, deadlines, a flush."""

import asyncio
import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minidsa.scheduler.messages import (
    EngineStats,
    FlushCache,
    Handling,
    Heartbeat,
    Outputs,
    RequestOutput,
)
from minidsa.server.activity import activity_line
from patience import until
from scripted_engine import server_config, serving
from sse_reader import post, read_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("n", [1, 3])
async def test_cached_tokens_are_in_the_usage_of_every_form(n):
    async with serving() as bed:
        bed.engine.cached = 2
        body = {"messages": HI, "max_tokens": 3, "n": n}
        usage = (await post(bed, CHAT, **body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        assert usage["prompt_cache_hit_tokens"] == 2
        assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 2
        options = {"include_usage": True}
        streamed = await post(bed, CHAT, **body, stream=True, stream_options=options)
        assert read_events(streamed.text)[-1]["usage"] == usage
        body = {"prompt": ["a b c", "d e f"], "max_tokens": 2, "n": n}
        usage = (await post(bed, COMPLETIONS, **body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}  # once a prompt


async def test_salt_and_opt_out_reach_the_engine():
    async with serving() as bed:
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
            bed.engine.seen.clear()
            for fields in ({}, {"cache_salt": "s"}, {"cache_prompt": False}, {"cache_salt": None}):
                await post(bed, path, **body, max_tokens=1, **fields)
            plain, salted, off, null = (command.handling for command in bed.engine.submits)
            assert plain == null == Handling()
            assert salted == Handling(cache_salt="s")
            assert off == Handling(uses_cache=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_prompt": "false"}, "cache_prompt"),
        ({"cache_promt": False}, "cache_promt"),
        ({"tenant": "other"}, "tenant"),
    ],
)
async def test_sch_09_sch_21_misspelt_and_foreign_fields_are_refused(fields, param):
    async with serving() as bed:
        response = await post(bed, CHAT, messages=HI, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert not bed.engine.submits


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
async def test_flush_is_done_when_idle_and_refused_when_busy(path):
    async with serving(pace=0.01) as bed:
        response = await bed.client.post(path)
        assert (response.status_code, response.json()) == (200, {"flushed": True})
        assert isinstance(bed.engine.seen[-1], FlushCache)
        running = asyncio.create_task(post(bed, COMPLETIONS, prompt="hi", max_tokens=200))
        await until(lambda: bed.engine.num_running == 1)
        response = await bed.client.post(path)
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "busy"
        running.cancel()
        await until(lambda: bed.engine.num_running == 0)
        assert (await bed.client.post(path)).status_code == 200


async def test_flush_does_not_wait_for_an_engine_that_is_gone():
    async with serving() as bed:
        bed.engine.die()
        await bed.service.client.dead.wait()
        assert (await bed.client.post("/flush_cache")).status_code == 503


async def test_hits_and_evictions_are_counted():
    stats = EngineStats(
        num_pages=100,
        num_free_pages=75,
        num_cached_pages=40,
        num_prompt_tokens=500,
        num_prefix_queries=400,
        num_prefix_hits=100,
        num_evictions=7,
    )
    async with serving() as bed:
        bed.engine.emit(Heartbeat(stats))
        await until(lambda: bed.service.client.stats == stats)
        text = (await bed.client.get("/metrics")).text
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["minidsa:prefix_cache_queries_total"] == 400
    assert values["minidsa:prefix_cache_hits_total"] == 100
    assert values["minidsa:prefix_cache_evictions_total"] == 7
    assert values["minidsa:prefix_cache_pages"] == 40
    assert "25% of prompts found" in (activity_line(EngineStats(), stats, 10.0) or "")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_api_61_priorities_are_obeyed_or_refused(policy):
    config = server_config()
    scheduler = dataclasses.replace(config.engine.scheduler, policy=policy)
    config = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, scheduler=scheduler)
    )
    async with serving(config=config) as bed:
        assert (await post(bed, CHAT, messages=HI, max_tokens=1, priority=0)).status_code == 200
        response = await post(bed, CHAT, messages=HI, max_tokens=1, priority=-3)
        if policy == "priority":
            assert bed.engine.submits[-1].handling.priority == -3
        else:
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", "priority")


async def test_sch_25_a_request_that_waited_too_long_is_told_to_come_again():
    async with serving() as bed:
        bed.engine.held = True
        body = {"prompt": "hi", "deadline_seconds": 2.5}
        running = asyncio.create_task(post(bed, COMPLETIONS, **body))
        await until(lambda: bool(bed.engine.submits))
        (command,) = bed.engine.submits
        assert command.handling.deadline_seconds == 2.5
        end = RequestOutput(command.request_id, [], "error", error="late", error_kind="timeout")
        bed.engine.emit(Outputs([end], EngineStats()))
        response = await running
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_timeout"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (COMPLETIONS, {"prompt": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_sch_21_every_route_names_the_tenant_by_its_key(tmp_path, path, body):
    file = tmp_path / "keys.toml"
    file.write_text('[alice]\nkey = "a"\n[bob]\nkey = "b"\n')
    async with serving(
        lambda submit: [120, 1], config=server_config(api_key_file=str(file))
    ) as bed:
        for key in ("a", "b", "a"):
            headers = {"authorization": f"Bearer {key}"}
            response = await bed.client.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
        tenants = [command.handling.tenant for command in bed.engine.submits]
    assert tenants[0] == tenants[2] != tenants[1]
    assert all(tenants) and not set(tenants) & {"a", "b"}
