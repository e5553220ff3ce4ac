"""What happens when the engine is slow, full or gone, when clients leave, when the server stops."""

import asyncio
import itertools
import time
from collections.abc import Iterable

import httpx
import pytest

from minidsa.scheduler.messages import EngineStats, Failed, Heartbeat, Outputs, RequestOutput
from minidsa.server.activity import activity_line, report_activity
from minidsa.server.engine_client import EngineClient, Health
from minidsa.server.start_failed import StartFailed
from patience import PATIENCE, until
from scripted_engine import EOS, VOCAB, Bed, ScriptedEngine, server_config, serving
from sse_reader import post, read_events
from tokenizers_small import small_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def endless(submit: object) -> Iterable[int]:
    return itertools.repeat(120)


async def test_api_57_nothing_is_served_while_loading():
    async with serving(ready=False) as bed:
        response = await bed.client.get("/health")
        assert (response.status_code, response.content) == (503, b"")
        assert (await bed.client.get("/live")).status_code == 200
        refused = await post(bed, CHAT, messages=HI)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert (await bed.client.get("/v1/models")).status_code == 200
        assert bed.engine.seen == []


async def test_health_is_empty_and_needs_no_tokens():
    async with serving() as bed:
        for path in ("/health", "/ping"):
            response = await bed.client.get(path)
            assert (response.status_code, response.content) == (200, b"")
        assert bed.engine.seen == []


async def test_silence_of_an_idle_engine_is_not_health():
    config = server_config(heartbeat_seconds=1.0)
    async with serving(config=config) as bed:
        assert (await bed.client.get("/health")).status_code == 200
        await until(lambda: bed.service.client.health is not Health.READY)
        assert (await bed.client.get("/health")).status_code == 503
        bed.engine.emit(Heartbeat(EngineStats()))
        await until(lambda: bed.service.client.health is Health.READY)


async def test_a_busy_engine_may_be_silent_for_a_long_step():
    config = server_config(heartbeat_seconds=0.05)
    async with serving(config=config) as bed:
        bed.engine.held = True
        running = asyncio.create_task(post(bed, CHAT, messages=HI, max_tokens=1))
        await asyncio.sleep(0.1)
        assert (await bed.client.get("/health")).status_code == 200
        bed.engine.held = False
        assert (await running).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_ops_02_the_engine_dies(path, stream):
    async with serving(endless, pace=0.002) as bed:
        body = {"messages": HI} if path == CHAT else {"prompt": "hi", "max_tokens": 200}
        runs = [asyncio.create_task(post(bed, path, stream=stream, **body)) for _ in range(20)]
        await until(lambda: bed.engine.num_running == 20)
        await asyncio.sleep(0.01)
        bed.engine.die()
        start = time.monotonic()
        for response in await asyncio.gather(*runs):
            if stream:
                last = read_events(response.text)[-1]
                assert set(last["error"]) == {"message", "type", "param", "code"}
                assert last["error"]["code"] == "service_unavailable"
            else:
                assert response.status_code == 503
        assert time.monotonic() - start < PATIENCE
        assert (await bed.client.get("/health")).status_code == 503
        assert (await post(bed, path, **body)).status_code == 503
        assert bed.service.generations == {}


async def test_the_engine_says_that_it_fails():
    async with serving(endless, pace=0.002) as bed:
        running = asyncio.create_task(post(bed, CHAT, messages=HI))
        await until(lambda: bed.engine.num_running == 1)
        bed.engine.emit(Failed("not even one token can be computed"))
        assert (await running).status_code == 503
        assert bed.service.client.failure == "not even one token can be computed"


@pytest.mark.parametrize("is_setting", [False, True])
async def test_what_an_engine_cannot_start_with_is_told_as_what_it_is(is_setting):
    engine = ScriptedEngine()
    engine.emit(Failed("no such thing", is_setting))
    with pytest.raises(StartFailed, match="no such thing") as caught:
        await EngineClient(engine, 1.0, 1.0).plan()
    assert caught.value.is_setting is is_setting


@pytest.mark.parametrize("stream", [True, False])
async def test_ops_06_one_request_fails_and_the_others_go_on(stream):
    async with serving(lambda submit: [120, 121, EOS], pace=0.02) as bed:
        failing = asyncio.create_task(post(bed, CHAT, messages=HI, n=2, stream=stream))
        other = asyncio.create_task(post(bed, CHAT, messages=HI))
        await until(lambda: bed.engine.num_running == 3)
        name = bed.engine.submits[0].request_id
        secret = "traceback /path/x.py line 5"
        bed.engine.emit(Outputs([RequestOutput(name, [], "error", error=secret)], EngineStats()))
        response = await failing
        assert "secret" not in response.text and "traceback" not in response.text
        if stream:
            assert read_events(response.text)[-1]["error"]["code"] == "internal_error"
        else:
            assert response.status_code == 500
        assert (await other).status_code == 200
        # Its other choice is of no use any more.
        assert bed.engine.submits[1].request_id in bed.engine.aborts
        assert bed.service.generations == {}


async def test_a_full_queue_is_told_at_once():
    config = server_config(max_queue=2)
    async with serving(endless, pace=0.005, config=config) as bed:
        capacity = bed.service.capacity
        assert capacity == bed.service.info.max_num_seqs + 2
        runs = [asyncio.create_task(post(bed, CHAT, messages=HI)) for _ in range(capacity)]
        await until(lambda: bed.engine.num_running == capacity)
        start = time.perf_counter()
        refused = await post(bed, CHAT, messages=HI)
        assert time.perf_counter() - start < PATIENCE
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_overloaded"
        assert (await bed.client.get("/health")).status_code == 200
        await post(bed, "/abort", all=True)
        await asyncio.gather(*runs)
        assert (await post(bed, CHAT, messages=HI, max_tokens=1)).status_code == 200


async def test_more_choices_than_there_are_places_is_a_mistake():
    config = server_config(max_queue=1)
    async with serving(config=config) as bed:
        refused = await post(bed, CHAT, messages=HI, n=66)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"


async def leave(bed: Bed, path: str, body: dict, num_submits: int) -> None:
    """A client that goes away once the engine has taken in that many requests."""
    request = bed.client.build_request("POST", path, json=body)
    gone = asyncio.Event()
    sent = False

    async def receive() -> dict:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": request.content, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        await asyncio.sleep(0)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "server": ("test", 80), "client": ("test", 1),
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    call = asyncio.create_task(bed.app(scope, receive, send))  # type: ignore[arg-type]
    await until(lambda: len(bed.engine.submits) >= num_submits)
    gone.set()
    await asyncio.wait_for(call, PATIENCE)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_api_43_a_client_that_leaves_frees_its_place_at_once(stream, n):
    async with serving(endless, pace=0.1) as bed:
        bodies = ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"}))
        for i, (path, body) in enumerate(bodies, 1):
            body = body | {"stream": stream, "n": n, "max_tokens": 200}
            await leave(bed, path, body, i * n)
        assert len(bed.engine.aborts) == 2 * n
        assert bed.engine.num_running == 0
        assert bed.service.generations == {} and bed.service.client.num_open == 0
        text = (await bed.client.get("/metrics")).text
        assert f'route="{CHAT}",status="499"' in text


async def test_200_clients_leave_and_the_next_is_served():
    async with serving(endless, pace=0.1) as bed:
        body = {"messages": HI, "stream": True}
        await asyncio.gather(*(leave(bed, CHAT, body, 200) for _ in range(200)))
        assert bed.engine.num_running == 0
        answer = await asyncio.wait_for(post(bed, CHAT, messages=HI, max_tokens=2), PATIENCE)
        assert answer.status_code == 200


async def test_a_finished_request_is_not_aborted():
    async with serving(lambda submit: [120, EOS]) as bed:
        await post(bed, CHAT, messages=HI)
        await post(bed, CHAT, messages=HI, stream=True)
        assert bed.engine.aborts == []


async def test_a_stop_string_aborts_what_still_runs():
    letter = small_tokenizer(VOCAB).encode_runs(["x"])
    async with serving(lambda submit: letter * 10**6) as bed:
        answer = await post(bed, COMPLETIONS, prompt="hi", stop=["xxx"], max_tokens=200)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert bed.engine.aborts == [bed.engine.submits[0].request_id]
        assert bed.engine.num_running == 0


async def test_ops_07_draining_refuses_new_requests_and_finishes_open_ones():
    async with serving(lambda submit: [120] * 9 + [EOS], pace=0.005) as bed:
        running = asyncio.create_task(post(bed, CHAT, messages=HI, stream=True))
        await until(lambda: bed.engine.num_running == 1)
        bed.service.client.drain()
        assert (await bed.client.get("/health")).status_code == 503
        assert (await bed.client.get("/live")).status_code == 200
        refused = await post(bed, CHAT, messages=HI)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        chunks = read_events((await running).text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_slow_readers_get_steps_together():
    """Outputs that wait for one stream become one chunk, with all their ids."""
    async with serving(lambda submit: [*range(110, 140), EOS]) as bed:
        bed.engine.held = True
        running = asyncio.create_task(
            post(bed, COMPLETIONS, prompt="hi", stream=True, return_token_ids=True, max_tokens=40)
        )
        await until(lambda: bed.engine.num_running == 1)
        name = bed.engine.submits[0].request_id
        outputs = [RequestOutput(name, [token_id]) for token_id in range(110, 140)]
        for output in outputs:
            bed.engine.emit(Outputs([output], EngineStats()))
        bed.engine.emit(Outputs([RequestOutput(name, [EOS], "stop")], EngineStats()))
        bed.engine.held = False
        response: httpx.Response = await running
        ids = [c["choices"][0].get("token_ids", []) for c in read_events(response.text)]
        assert [token_id for step in ids for token_id in step] == [*range(110, 140), EOS]
        assert max(map(len, ids)) > 1


def test_the_activity_line_is_silent_when_idle():
    idle = EngineStats(num_pages=100, num_free_pages=100)
    assert activity_line(idle, idle, 10.0) is None
    busy = EngineStats(
        num_running=3,
        num_waiting=2,
        num_pages=100,
        num_free_pages=75,
        num_prompt_tokens=500,
        num_generation_tokens=1230,
        num_preemptions=1,
    )
    assert activity_line(idle, busy, 10.0) == (
        "50 prompt and 123 output tokens/s; 3 running, 2 waiting; cache 25% used; 1 preempted"
    )


async def test_activity_is_reported_until_the_end():
    lines: list[str] = []
    busy = EngineStats(num_running=1)
    task = asyncio.create_task(report_activity(lambda: busy, lines.append, interval=0.001))
    await until(lambda: len(lines) > 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert lines[0].endswith("1 running, 0 waiting; cache 0% used")
