"""Rows of the API that hold on both generating routes alike, streamed and whole."""

from typing import Any

import msgspec
import pytest

from scripted_engine import CONTEXT, EOS, INFO, VOCAB, server_config, serving
from sse_reader import both, join, post, stream
from written_answers import write

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROUTES = [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})]
routes = pytest.mark.parametrize(("path", "body"), ROUTES)
WORDS = ("one two three", EOS)


async def refusal(bed: Any, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error of a request, which is the same where a stream is asked for."""
    errors = []
    for more in ({}, {"stream": True}):
        answer = await post(bed, path, **body, **more)
        assert answer.status_code == status, answer.text
        errors.append(answer.json()["error"])
    assert errors[0] == errors[1]
    return errors[0]


async def test_api_02_api_03_a_model_by_its_name():
    async with serving(config=server_config(served_model_name="org/name")) as bed:
        assert (await bed.client.get("/v1/models/org/name")).json()["id"] == "org/name"
        for name in ("org", "name", "org/name/x"):
            answer = await bed.client.get(f"/v1/models/{name}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


@routes
@pytest.mark.parametrize("key", ["abc", str(VOCAB), "-1", "1.0", "01", "", " 1"])
async def test_api_19_a_wrong_key_of_the_bias_is_named(path, body, key):
    async with serving() as bed:
        error = await refusal(bed, path, {**body, "logit_bias": {key: 1}})
        assert error["param"] == "logit_bias" and f"'{key}'" in error["message"]


@routes
async def test_api_27_hits_and_misses_of_the_cache_make_the_prompt(path, body):
    async with serving(write(*WORDS)) as bed:
        bed.engine.cached = 2
        usage = (await post(bed, path, **body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert usage["prompt_cache_hit_tokens"] == 2
        assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 2 > 0


@routes
@pytest.mark.parametrize("n", [1, 2])
async def test_api_36_api_37_api_41_the_chunks_of_a_stream(path, body, n):
    async with serving(write(*WORDS)) as bed:
        asked = {**body, "n": n, "stream_options": {"include_usage": True}}
        chunks = await stream(bed, path, **asked)
        usage = (await post(bed, path, **body, n=n)).json()["usage"]
        *others, last = chunks
        assert last["choices"] == [] and last["usage"] == usage
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in others)
        answers = join(chunks)
        assert sorted(answers) == list(range(n))
        assert all(answer["finish_reason"] == "stop" for answer in answers.values())
        if path == CHAT:
            for index in range(n):
                deltas = [c["choices"][0] for c in others if c["choices"][0]["index"] == index]
                first, *rest = [choice["delta"] for choice in deltas]
                assert first == {"role": "assistant", "content": ""}
                assert not any("role" in delta for delta in rest)


@routes
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_api_38_no_usage_where_none_is_asked_for(path, body, options):
    async with serving(write(*WORDS)) as bed:
        chunks = await stream(bed, path, **body, stream_options=options)
        assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)


@routes
async def test_api_44_api_45_chunks_are_strict_json_and_constant_in_what_names_them(path, body):
    async with serving(write(*WORDS)) as bed:
        chunks = await stream(bed, path, **body)  # reads strictly: no comments, no NaN
        names = [
            {key: chunk[key] for key in ("id", "created", "model", "object")} for chunk in chunks
        ]
        assert all(name == names[0] for name in names)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]


@routes
async def test_api_48_up_to_exactly_the_context(path, body):
    async with serving(lambda submit: [120] * 999) as bed:
        used = (await post(bed, path, **body, max_tokens=1)).json()["usage"]["prompt_tokens"]
        for field in ("max_tokens", "max_completion_tokens"):
            whole = await post(bed, path, **body, **{field: CONTEXT - used})
            assert whole.json()["usage"]["total_tokens"] == CONTEXT
            error = await refusal(bed, path, {**body, field: CONTEXT - used + 1})
            assert error["code"] == "context_length_exceeded"
            assert "This model's maximum context length is" in error["message"]


@routes
async def test_api_50_types_of_bodies(path, body):
    async with serving(write(*WORDS)) as bed:
        for name in ("text/plain", "application/json; charset=latin-1", "application/xml"):
            answer = await bed.client.post(path, json=body, headers={"content-type": name})
            assert answer.status_code == 415
            assert answer.json()["error"]["code"] == "unsupported_media_type"
        for name in ("application/json; charset=utf-8", "Application/JSON"):
            headers = {"content-type": name}
            assert (await bed.client.post(path, json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_api_56_either_header_carries_the_key(path):
    async with serving(write(*WORDS), config=server_config(api_key="k")) as bed:
        body = {"messages": HI, "max_tokens": 9}
        for headers in ({"authorization": "Bearer k"}, {"x-api-key": "k"}):
            assert (await bed.client.post(path, json=body, headers=headers)).status_code == 200
        for headers in ({"x-api-key": "K"}, {"authorization": "Basic k"}, {}):
            answer = await bed.client.post(path, json=body, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["message"]


async def test_api_82_an_empty_list_of_tools_is_none():
    async with serving(write(*WORDS)) as bed:
        plain = await both(bed, CHAT, messages=HI)
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
            assert await both(bed, CHAT, messages=HI, tools=[], **choice) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]},
    ],
)
async def test_api_83_a_choice_needs_its_tools(fields):
    async with serving() as bed:
        error = await refusal(bed, CHAT, {"messages": HI, **fields})
        assert error["param"] == "tool_choice"


async def test_api_83_a_choice_of_null_is_auto():
    # The list of tools makes the prompt longer than the usual context here.
    wide = msgspec.structs.replace(INFO, max_model_len=4096)
    async with serving(write(*WORDS), info=wide) as bed:
        plain = await both(bed, CHAT, messages=HI, tools=[TOOL], tool_choice="auto")
        assert await both(bed, CHAT, messages=HI, tools=[TOOL], tool_choice=None) == plain
