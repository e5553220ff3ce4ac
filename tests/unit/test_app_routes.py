"""Routes beside generation, errors of the HTTP layer, keys, ids, and what a client may not see."""

import ast
import asyncio
import gzip
import json
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minidsa.configs.server import LimitsConfig
from minidsa.scheduler.messages import DraftStats, EngineStats, Heartbeat, SelectionStats
from minidsa.scheduler.stats import STEP_SIZES
from minidsa.server import gate, keys
from minidsa.server.chat_protocol import ChatRequest
from minidsa.server.protocol import CompletionRequest
from patience import PATIENCE, until
from scripted_engine import EOS, INFO, VOCAB, Bed, server_config, serving
from sse_reader import post, read_events, stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def test_api_01_models():
    async with serving(config=server_config(served_model_name="org/name")) as bed:
        for path in ("/v1/models", "/models"):
            answer = (await bed.client.get(path)).json()
            (card,) = answer["data"]
            assert answer["object"] == "list"
            assert card["id"] == "org/name" and card["object"] == "model"
            assert isinstance(card["max_model_len"], int)
        for path in ("/v1/models/org/name", "/models/org/name", "/v1/models/org%2Fname"):
            assert (await bed.client.get(path)).json() == card
        error = error_of(await bed.client.get("/v1/models/other"), 404)
        assert error["code"] == "model_not_found"


async def test_api_95_tokens_there_and_back():
    async with serving() as bed:
        for text in ("hello", "emoji 😀 中文", "<｜User｜>"):
            tokens = (await post(bed, "/tokenize", prompt=text)).json()["tokens"]
            bare = (await post(bed, "/tokenize", content=text, add_special_tokens=False)).json()
            assert bare["tokens"] == tokens[1:]
            back = (await post(bed, "/detokenize", tokens=tokens[1:])).json()
            assert back == {"prompt": text}
        shown = (await post(bed, "/v1/tokenize", prompt="hi", return_token_strs=True)).json()
        assert "".join(shown["token_strs"]).endswith("hi")
        assert len(shown["token_strs"]) == shown["count"]
        await post(bed, CHAT, messages=HI, max_tokens=1)
        tokens = (await post(bed, "/tokenize", messages=HI)).json()["tokens"]
        assert tokens == bed.engine.submits[0].prompt_ids
        same = await post(bed, "/tokenize", messages=HI, add_special_tokens=False, tools=[])
        assert same.json()["tokens"] == tokens


@pytest.mark.parametrize(
    ("form", "field", "value"),
    [
        ({"messages": HI}, "add_special_tokens", True),
        ({"prompt": "x"}, "tools", [{"type": "function", "function": {"name": "f"}}]),
        ({"prompt": "x"}, "reasoning_effort", "high"),
        ({"content": "x"}, "continue_final_message", True),
    ],
)
async def test_tokenize_refuses_a_field_of_its_other_form(form, field, value):
    async with serving() as bed:
        error = error_of(await post(bed, "/tokenize", **form, **{field: value}), 400)
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [VOCAB]}),
        ("/detokenize", {"tokens": [2**70]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HI}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": HI, "chat_template": "x"}),
        ("/tokenize", {"prompt": "x" * 10**6}),
        ("/abort", {}),
        ("/abort", {"all": True, "request_id": "x"}),
    ],
)
async def test_side_routes_check_their_bodies(path, body):
    async with serving() as bed:
        error_of(await post(bed, path, **body), 400)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/abort"])
async def test_http_19_bodies_and_types(path):
    async with serving() as bed:

        async def send(content: bytes, **headers: str) -> httpx.Response:
            return await bed.client.post(path, content=content, headers=headers)

        for content in (b"", b"  ", b"null", b"[]", b'"x"', b"1", b"{", b"\xff", b'{"a":1,"a":2}'):
            error = error_of(await send(content, **{"content-type": "application/json"}), 400)
            assert error["code"] == "invalid_json"
        error_of(await send(b""), 400)
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
            error = error_of(await send(b"{}", **{"content-type": media_type}), 415)
            assert error["code"] == "unsupported_media_type"
        error_of(await send(b"{}"), 415)
        error_of(await send(b"{}", **{"content-type": "application/json; charset=latin-1"}), 415)
        unknown = await send(b'{"foo": 1}', **{"content-type": "application/json; charset=UTF-8"})
        assert "foo" in (error_of(unknown, 400)["message"] or "")


async def test_abu_13_packed_bodies_are_refused_unread():
    async with serving() as bed:
        packed = gzip.compress(b"\0" * 10**6)
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        error_of(await bed.client.post(CHAT, content=packed, headers=headers), 415)


async def test_bodies_have_a_bound():
    config = server_config(limits=LimitsConfig(max_body_bytes=1000))
    async with serving(config=config) as bed:
        error_of(await post(bed, CHAT, messages=HI, user="x" * 2000), 413)

        async def pieces():
            for _ in range(10**9):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        response = await bed.client.post(CHAT, content=pieces(), headers=headers)
        assert error_of(response, 413)["code"] == "request_too_large"
        assert response.headers["connection"] == "close"


async def test_a_body_that_stalls_times_out():
    config = server_config(limits=LimitsConfig(body_seconds=0.05))
    async with serving(config=config) as bed:

        async def pieces():
            yield b"{"
            await asyncio.sleep(2 * PATIENCE)

        headers = {"content-type": "application/json"}
        error_of(await bed.client.post(CHAT, content=pieces(), headers=headers), 408)


async def test_api_59_unknown_routes_and_methods():
    async with serving() as bed:
        error_of(await bed.client.get("/nope"), 404)
        response = await bed.client.get(CHAT)
        error_of(response, 405)
        assert response.headers["allow"] == "POST"
        error_of(await bed.client.put("/health"), 405)
        for path in ("/metrics", "/health", "/ping", "/live", "/version"):
            response = await bed.client.head(path)
            assert (response.status_code, response.content) == (200, b""), path


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1}, {"n": 0}, {"foo": 1}, {"messages": []}, {"max_tokens": 10**6},
        {"model": "other"}, {"top_logprobs": 21}, {"response_format": {"type": "xml"}},
    ],
)  # fmt: skip
async def test_api_46_checks_end_before_the_first_byte(fields):
    async with serving() as bed:
        start = time.perf_counter()
        response = await post(bed, CHAT, **({"messages": HI, "stream": True} | fields))
        assert time.perf_counter() - start < PATIENCE
        error_of(response, response.status_code)
        assert response.status_code in (400, 404)
        assert bed.engine.seen == []


async def test_api_54_a_huge_n_is_refused_at_once():
    async with serving() as bed:
        for n in (129, 10**6, 10**30):
            assert error_of(await post(bed, CHAT, messages=HI, n=n), 400)["param"] == "n"


async def test_api_55_every_route_but_the_open_ones_needs_the_key():
    async with serving(config=server_config(api_key="secret-key")) as bed:
        posts = (CHAT, COMPLETIONS, "/chat/completions", "/tokenize", "/detokenize", "/abort")
        gets = ("/v1/models", "/metrics", "/server_info", "/openapi.json", "/nope", "/health/")
        for path in gets:
            response = await bed.client.get(path)
            error = error_of(response, 401)
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in posts:
            error_of(await post(bed, path), 401)
        for path in ("/health", "/ping", "/live", "/version"):
            assert (await bed.client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer secret-ke"}, 401),
        ({"authorization": "Bearer secret-key2"}, 401),
        ({"authorization": "bearer secret-key"}, 401),
        ({"authorization": "secret-key"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"x-api-key": "secret-key"}, 200),
        ({"authorization": "Bearer secret-key"}, 200),
    ],
)
async def test_abu_18_keys(headers, status):
    async with serving(config=server_config(api_key="secret-key")) as bed:
        response = await bed.client.get("/v1/models?api_key=secret-key", headers=headers)
        assert response.status_code == status


def test_abu_18_keys_are_compared_by_digest_only():
    tree = ast.parse(Path(keys.__file__).read_text())
    compared = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and "digest" in ast.unparse(node)
    ]
    assert compared == []
    assert "compare_digest" in ast.unparse(tree)
    gate_tree = ast.unparse(ast.parse(Path(gate.__file__).read_text()))
    assert "authorization" not in gate_tree and "_keyring.find" in gate_tree


async def test_request_ids():
    async with serving() as bed:
        for given in ("abc", "x" * 128, "a/b:c"):
            response = await bed.client.post(
                CHAT, json={"messages": HI, "max_tokens": 1}, headers={"x-request-id": given}
            )
            assert response.headers["x-request-id"] == given
            assert response.json()["id"] == f"chatcmpl-{given}"
        for given in ("", "x" * 129, "a b", "é"):
            headers = [(b"x-request-id", given.encode("latin-1"))]
            response = await bed.client.get("/v1/models", headers=headers)
            assert response.headers["x-request-id"] not in ("", given)
        assert (await bed.client.get("/nope")).headers["x-request-id"]


async def test_one_id_twice_in_flight():
    async with serving(pace=0.01) as bed:
        body = {"messages": HI, "max_tokens": 3}
        headers = {"x-request-id": "same"}
        answers = await asyncio.gather(
            *(bed.client.post(CHAT, json=body, headers=headers) for _ in range(3))
        )
        ids = [answer.json()["id"] for answer in answers]
        assert len(set(ids)) == 3
        assert all(name.startswith("chatcmpl-same") for name in ids)


@pytest.mark.parametrize("length", [1, 6000])
async def test_two_posts_with_one_id_get_their_own_answers(length):
    """Also while their prompts are still encoded, which is when nothing is in flight yet."""
    wide = msgspec.structs.replace(INFO, max_model_len=10**5, num_cache_tokens=10**5)
    async with serving(lambda submit: [submit.prompt_ids[-1], EOS], info=wide) as bed:

        async def ask(letter: str) -> dict:
            body = {"prompt": letter * length, "max_tokens": 2}
            headers = {"x-request-id": "same"}
            return (await bed.client.post(COMPLETIONS, json=body, headers=headers)).json()

        bed.engine.held = True
        asking = asyncio.gather(*map(ask, "abcd"))
        while len(bed.engine.submits) < 4:
            await asyncio.sleep(0.005)
        bed.engine.held = False
        answers = await asking
        last = [bed.tokenizer.decode(bed.ids(letter * length)[-1:]) for letter in "abcd"]
        assert [answer["choices"][0]["text"] for answer in answers] == last
        assert len({answer["id"] for answer in answers}) == 4


async def test_api_97_abort():
    async with serving(lambda submit: [120] * 10**6, pace=0.005) as bed:

        async def run(name: str) -> httpx.Response:
            body = {"messages": HI, "stream": True, "n": 2}
            return await bed.client.post(CHAT, json=body, headers={"x-request-id": name})

        error = error_of(await post(bed, "/abort", request_id="nobody"), 404)
        assert error["code"] == "request_not_found"
        runs = [asyncio.create_task(run(name)) for name in ("a", "b", "c")]
        await until(lambda: bed.engine.num_running == 6)
        assert (await post(bed, "/abort", request_id="chatcmpl-a")).json() == {"aborted": 1}
        assert (await post(bed, "/abort", request_id="b")).json() == {"aborted": 1}
        await asyncio.gather(*runs[:2])
        assert (await post(bed, "/abort", all=True)).json() == {"aborted": 1}
        for run_task in runs:
            chunks = read_events((await run_task).text)
            ends = [c["choices"][0]["finish_reason"] for c in chunks]
            assert [end for end in ends if end] == ["abort", "abort"]
        assert bed.engine.num_running == 0
        assert (await post(bed, "/abort", all=True)).json() == {"aborted": 0}


async def metrics_of(bed: Bed) -> dict[str, float]:
    text = (await bed.client.get("/metrics")).text
    return {
        f"{sample.name}{sample.labels.get('finished_reason', '')}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels and "route" not in sample.labels
    }


async def test_api_96_metrics():
    async with serving(lambda submit: [120] * 999) as bed:
        before = await metrics_of(bed)
        await post(bed, CHAT, messages=HI, max_tokens=4, n=2)
        await stream(bed, CHAT, messages=HI, max_tokens=4)
        after = await metrics_of(bed)
        assert after["minidsa:num_requests_running"] == 0
        assert after["minidsa:request_success_totallength"] == 3
        assert after["minidsa:time_to_first_token_seconds_count"] == 2
        assert after["minidsa:e2e_request_latency_seconds_count"] == 2
        for name in ("queue_time", "prefill_time", "decode_time", "time_per_output_token"):
            assert after[f"minidsa:request_{name}_seconds_count"] == 3, name
        # Three choices of four tokens: nine came behind another one.
        assert after["minidsa:inter_token_latency_seconds_count"] == 9
        assert all(after[name] >= value for name, value in before.items())
        text = (await bed.client.get("/metrics")).text
        assert (
            'http_requests_total{model_name="tiny",route="/v1/chat/completions",status="200"} 2.0'
            in text
        )
        await bed.client.get("/secret/path")
        text = (await bed.client.get("/metrics")).text
        assert 'route="unmatched",status="404"' in text and "secret" not in text


REFERENCE_METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "iteration_tokens_total_bucket",
    "cache_config_info",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "indexer_time_seconds_sum",
    "sparse_topk_used_sum",
    "http_requests_total",
)


async def test_api_96_every_metric_has_the_prefix_that_is_set_and_the_model():
    selection = SelectionStats(num_timed=4, seconds=0.5, num_rows=2, num_keys=96)
    stats = EngineStats(
        num_steps=3,
        num_step_tokens=42,
        step_sizes=(1, 0, 1, 1, *(0,) * (len(STEP_SIZES) - 3)),
        drafts=DraftStats(1, 2, 1, [1, 0], 2),
        selection=selection,
    )
    async with serving(config=server_config(metrics_prefix="vllm")) as bed:
        bed.engine.emit(Heartbeat(stats))
        await until(lambda: bed.service.client.stats == stats)
        await bed.client.get("/health")
        text = (await bed.client.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    names = {sample.name for sample in samples}
    assert {f"vllm:{name}" for name in REFERENCE_METRICS} - names == set()
    ours = [sample for sample in samples if not sample.name.endswith("_created")]
    assert all(s.name.startswith("vllm:") and s.labels["model_name"] == "tiny" for s in ours)
    values = {(s.name.partition(":")[2], s.labels.get("le")): s for s in samples}
    (cache,) = (s for s in samples if s.name == "vllm:cache_config_info")
    assert (cache.value, cache.labels["block_size"]) == (1, "16")
    assert cache.labels["num_gpu_blocks"] == "256"
    assert values["indexer_time_seconds_sum", None].value == 0.5
    assert values["sparse_topk_used_sum", None].value == 96
    steps = [values["iteration_tokens_total_bucket", le].value for le in ("1.0", "16.0", "+Inf")]
    assert steps == [1, 2, 3]
    assert values["iteration_tokens_total_sum", None].value == 42


async def test_server_info_tells_no_secrets():
    config = server_config(api_key="hush")
    async with serving(config=config) as bed:
        headers = {"x-api-key": "hush"}
        text = (await bed.client.get("/server_info", headers=headers)).text
        assert "hush" not in text
        info = json.loads(text)
        assert info["engine"]["vocab_size"] == VOCAB
        assert info["settings"]["engine"]["scheduler"]["max_queue"] == 1024
        assert "model" not in info["settings"]["engine"]
        assert info["chat_format"] == "deepseek_v32"


async def test_openapi_names_bodies_and_errors():
    async with serving() as bed:
        document = (await bed.client.get("/openapi.json")).json()
        operation = document["paths"][CHAT]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ChatRequest"}
        assert {"200", "400", "404", "413", "415", "503"} <= set(operation["responses"])
        fields = document["components"]["schemas"]["ChatRequest"]["properties"]
        assert {"messages", "temperature", "tools", "stop"} <= set(fields)
        text = json.dumps(document)
        for name in document["components"]["schemas"]:
            assert text.count(name)


async def test_paths_without_v1_are_aliases():
    async with serving(lambda submit: [120, EOS]) as bed:
        assert (await post(bed, "/chat/completions", messages=HI)).status_code == 200
        assert (await post(bed, "/completions", prompt="hi")).status_code == 200


async def test_api_60_errors_tell_nothing_about_the_inside(monkeypatch):
    async with serving() as bed:

        def fail(*args: object) -> None:
            raise RuntimeError("/secret/path.py line 3")

        monkeypatch.setattr(type(bed.tokenizer), "encode_runs", fail)
        response = await post(bed, CHAT, messages=HI)
        error = error_of(response, 500)
        assert error["type"] == "server_error"
        assert "secret" not in response.text


ODD = (
    "null", "true", "-1", "0", "1.0", "1e999", "NaN", "2147483648", "9223372036854775808",
    "1" + "0" * 30, "9" * 5000, '"3"', '""', "[]", "[[]]", "{}", '{"a": null}', '"\\ud800"',
    '"\\u0000\\u007f"', "[1, \"a\"]", '["", null]', '{"type": []}', "[" * 40 + "]" * 40,
)  # fmt: skip


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
async def test_abu_03_no_value_of_any_field_is_a_fault(model):
    """Every field with every odd value: served or refused by name, never a 500, engine unharmed."""
    path = CHAT if model is ChatRequest else COMPLETIONS
    needed = {"messages": json.dumps(HI), "prompt": '"hi"', "max_tokens": "1"}
    if model is ChatRequest:
        del needed["prompt"]
    else:
        del needed["messages"]
    async with serving(lambda submit: [120, EOS]) as bed:
        for field in (*model.model_fields, "unknown"):
            for value in ODD:
                entries = ", ".join(f'"{k}": {v}' for k, v in (needed | {field: value}).items())
                response = await bed.client.post(
                    path,
                    content=f"{{{entries}}}".encode(),
                    headers={"content-type": "application/json"},
                )
                assert response.status_code in (200, 400, 404), (field, value, response.text)
                if response.status_code == 400:
                    error = error_of(response, 400)
                    assert len(error["message"] or "") < 1500
        assert bed.engine.num_running == 0


async def test_abu_12_control_characters_are_text_like_any_other():
    async with serving(lambda submit: [120, EOS]) as bed:
        for text in ("\0", "\x7f", "\ufeff", "\u202e", "\r\n"):
            answer = await post(bed, CHAT, messages=[{"role": "user", "content": text}])
            assert answer.status_code == 200
            back = await post(bed, "/detokenize", tokens=bed.ids(text))
            assert back.json() == {"prompt": text}


async def test_abu_09_long_texts_are_encoded_beside_the_event_loop(monkeypatch):
    threads: list[bool] = []
    main = threading.get_ident()
    wide = msgspec.structs.replace(INFO, max_model_len=10**6, num_cache_tokens=10**6)
    async with serving(info=wide) as bed:
        encode = type(bed.tokenizer).encode_text

        def watched(self, text, add_bos=True):
            threads.append(threading.get_ident() == main)
            return encode(self, text, add_bos)

        monkeypatch.setattr(type(bed.tokenizer), "encode_text", watched)
        for text in ("short", "a" * 100_000):
            assert (await post(bed, COMPLETIONS, prompt=text, max_tokens=1)).status_code == 200
        assert threads == [True, False]
    async with serving() as bed:
        # In a small context the text is refused before anybody encodes it.
        error_of(await post(bed, COMPLETIONS, prompt="a" * 10**6), 400)
    assert len(threads) == 2


UNKNOWN = {"foo": 1, "messages": [{"role": "user", "content": "hi", "bar": 2}], "max_token": 3}


async def test_unknown_fields_are_refused_with_the_nearest_name():
    async with serving() as bed:
        error = error_of(await post(bed, CHAT, **UNKNOWN), 400)
        assert error["code"] == "unsupported_parameter"
        message = error["message"] or ""
        assert "messages.0.bar is not supported" in message
        assert "did you mean max_tokens?" in message


async def test_unknown_fields_can_be_allowed():
    wide = msgspec.structs.replace(INFO, max_model_len=4096)
    async with serving(info=wide, config=server_config(allow_unknown_fields=True)) as bed:
        body = UNKNOWN | {"max_tokens": 2, "tools": [
            {"type": "function", "x": 1, "function": {"name": "f", "y": {"z": 1}}}]}  # fmt: skip
        assert (await post(bed, CHAT, **body)).status_code == 200
        text = bed.tokenizer.decode(bed.engine.submits[0].prompt_ids)
        assert '{"name": "f"}' in text
        block = {"type": "text", "text": "hi", "other": 1}
        messages = [{"role": "user", "content": [block]}]
        answer = await post(bed, "/v1/messages", messages=messages, max_tokens=2, top=1)
        assert answer.status_code == 200
        # What is known is as strict as ever, and what is refused stays refused.
        assert error_of(await post(bed, CHAT, **body, temperature=9), 400)["param"] == "temperature"
        assert error_of(await post(bed, CHAT, **body, best_of=9), 400)["param"] == "best_of"
