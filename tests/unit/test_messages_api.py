"""Anthropic's Messages API over a scripted engine, through the official client."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest

from patience import until
from scripted_engine import EOS, INFO, Bed, server_config, serving
from written_answers import CALL, write

if TYPE_CHECKING:
    import anthropic

PATH = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "hi"}]
WIDE = msgspec.structs.replace(INFO, max_model_len=4096)
TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "adds",
        "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(autouse=True, scope="module")
def imported():
    """Takes seconds, which only the process that runs these tests needs, and no engine may wait."""
    import anthropic  # noqa: F401 - for all that follow


def official(bed: Bed, key: str = "x") -> "anthropic.AsyncAnthropic":
    """The official client over the bed's application; it reads a stream once that has ended."""
    import anthropic

    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(bed.app))
    return anthropic.AsyncAnthropic(
        base_url="http://test", api_key=key, max_retries=0, http_client=http
    )


async def ask(bed: Bed, **fields: Any) -> "anthropic.types.Message":
    """The answer, which is the same streamed and whole but for its id."""
    body = {"model": "tiny", "max_tokens": 200, "messages": HI} | fields
    whole = await official(bed).messages.create(**body)
    async with official(bed).messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    return whole


def prompt_text(bed: Bed) -> str:
    return bed.tokenizer.decode(bed.engine.submits[-1].prompt_ids)


async def chat_prompt(bed: Bed, **body: Any) -> list[int]:
    answer = await bed.client.post("/tokenize", json=body)
    return answer.json()["tokens"]


@pytest.mark.parametrize("burst", [1, 5, 100])
async def test_api_98_text(burst):
    async with serving(write("hello there", EOS), burst=burst) as bed:
        answer = await ask(bed)
        assert [block.type for block in answer.content] == ["text"]
        assert answer.content[0].text == "hello there"  # type: ignore[union-attr]
        assert (answer.role, answer.model, answer.type) == ("assistant", "tiny", "message")
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        prompt = await chat_prompt(bed, messages=HI)
        assert answer.usage.input_tokens == len(prompt)
        assert bed.engine.submits[-1].prompt_ids == prompt
        assert answer.usage.output_tokens == len(bed.ids("hello there")) + 1
        assert answer.id.startswith("msg_")


async def test_api_98_stop_sequences_and_lengths():
    async with serving(write("one STOP two", EOS)) as bed:
        answer = await ask(bed, stop_sequences=["STOP", "two"])
        assert answer.content[0].text == "one "  # type: ignore[union-attr]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
        answer = await ask(bed, max_tokens=2)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)


@pytest.mark.parametrize("burst", [1, 7, 100])
async def test_api_98_thoughts_text_and_calls_in_order(burst):
    script = write("hm", "</think>", "I add.", CALL.format(note='x"y'), "\nDone.", EOS)
    async with serving(script, burst=burst, info=WIDE) as bed:
        answer = await ask(bed, tools=TOOLS, thinking=THINK, max_tokens=2000)
        kinds = [block.type for block in answer.content]
        assert kinds == ["thinking", "text", "tool_use", "text"]
        thoughts, text, call, rest = (block.model_dump() for block in answer.content)
        assert (thoughts["thinking"], text["text"], rest["text"]) == ("hm", "I add.", "\nDone.")
        assert call["name"] == "add" and call["input"] == {"a": 2, "note": 'x"y'}
        assert answer.stop_reason == "tool_use"
        hidden = await ask(
            bed, tools=TOOLS, thinking=THINK | {"display": "omitted"}, max_tokens=2000
        )
        assert [block.type for block in hidden.content] == kinds[1:]


async def test_the_events_of_a_stream_are_named_and_in_order():
    async with serving(write("hm", "</think>", "ab", EOS)) as bed:
        body = {"max_tokens": 50, "messages": HI, "stream": True, "thinking": {"type": "adaptive"}}
        response = await bed.client.post(PATH, json=body, params={"beta": "true"})
        names = []
        for event in response.text.removesuffix("\n\n").split("\n\n"):
            first, second = event.split("\n")
            data = json.loads(second.removeprefix("data: "))
            assert first == f"event: {data['type']}"
            names.append((data["type"], data.get("index")))
        merged = [name for place, name in enumerate(names) if name != names[place - 1]]
        assert merged == [
            ("message_start", None),
            *((f"content_block_{part}", 0) for part in ("start", "delta", "stop")),
            *((f"content_block_{part}", 1) for part in ("start", "delta", "stop")),
            ("message_delta", None),
            ("message_stop", None),
        ]


async def test_a_tool_loop_reads_back_its_own_answer():
    script = write("hm", "</think>", CALL.format(note="n"), EOS)
    async with serving(script, info=WIDE) as bed:
        first = await ask(bed, tools=TOOLS, thinking=THINK, max_tokens=2000)
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        call = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}  # type: ignore[union-attr]
        messages = [
            *HI,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        await ask(bed, messages=messages, tools=TOOLS, max_tokens=1)
        text = prompt_text(bed)
        assert '<｜DSML｜parameter name="note" string="true">n<' in text
        assert "<result>5</result>" in text and text.endswith(
            "<｜User｜>and?<｜Assistant｜></think>"
        )
        failed = result | {"is_error": True, "content": [{"type": "text", "text": "no"}]}
        messages[-1] = {"role": "user", "content": [failed]}
        await ask(bed, messages=messages, tools=TOOLS, max_tokens=1)
        assert "<result>Error:\n\nno</result>" in prompt_text(bed)


async def test_a_call_that_is_cut_never_looks_complete():
    async with serving(write(CALL.format(note="n" * 50)), info=WIDE) as bed:
        cut = len(bed.tokenizer.encode_text(CALL.format(note="n" * 20), add_bos=False)) - 20
        body = {"messages": HI, "tools": TOOLS, "max_tokens": cut}
        answer = (await bed.client.post(PATH, json=body)).json()
        assert answer["stop_reason"] == "max_tokens"
        assert set(answer["content"][-1]["input"]) == {"partial_json"}


async def test_the_prompt_is_that_of_the_same_chat():
    async with serving(info=WIDE) as bed:
        text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
        await ask(
            bed,
            system=[{"type": "text", "text": "s"}, text],
            messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, text]}],
            tools=TOOLS,
            thinking={"type": "enabled", "budget_tokens": 7},
            metadata={"user_id": "me"},
            max_tokens=1,
        )
        function = {"name": "add", "description": "adds", "parameters": TOOLS[0]["input_schema"]}
        assert bed.engine.submits[-1].prompt_ids == await chat_prompt(
            bed,
            messages=[
                {"role": "system", "content": "s\n\nb"},
                {"role": "user", "content": "a\n\nb"},
            ],
            tools=[{"type": "function", "function": function}],
            thinking=True,
        )
        params = bed.engine.submits[-1].params
        assert params.thinking_budget == 7
        assert params.end_think_id == bed.tokenizer.control["</think>"]


async def test_a_last_assistant_message_is_continued():
    async with serving(write(" world", EOS)) as bed:
        prefill = {"role": "assistant", "content": "Hello"}
        sampling = {"temperature": 0.5, "top_k": 5, "top_p": 0.5}
        answer = await ask(bed, messages=[*HI, prefill], extra_body=sampling)
        assert answer.content[0].text == " world"  # type: ignore[union-attr]
        assert prompt_text(bed).endswith("</think>Hello")
        params = bed.engine.submits[-1].params
        assert (params.temperature, params.top_k, params.top_p) == (0.5, 5, 0.5)


async def test_count_tokens_counts_what_generation_reads():
    async with serving(info=WIDE) as bed:
        count = await official(bed).messages.count_tokens(model="tiny", messages=HI, tools=TOOLS)
        answer = await ask(bed, tools=TOOLS, max_tokens=1)
        assert count.input_tokens == answer.usage.input_tokens


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]},
     "is not the system's"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
     "is not the user's"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
     "messages.0.content.0"),
    ({"messages": [*HI, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "followed by tool messages"),
    ({"temperature": 3.0}, "temperature"),
    ({"top_k": -3}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"container": "x"}, "container is not supported"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"output_config": {"format": {"type": "nonsense"}}}, "output_config.format"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), WRONG)
async def test_api_99_mistakes_are_told_in_this_api_s_shape(fields, text):
    async with serving() as bed:
        body = {"model": "tiny", "max_tokens": 5, "messages": HI} | fields
        response = await bed.client.post(PATH, json=body)
        answer = response.json()
        assert response.status_code == 400 and set(answer) == {"type", "error", "request_id"}
        assert answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
        assert answer["error"]["type"] == "invalid_request_error"
        assert text in answer["error"]["message"]
        assert answer["request_id"] == response.headers["request-id"]
        assert bed.engine.seen == []


async def test_every_status_has_this_api_s_shape():
    import anthropic

    config = server_config(api_key="secret")
    async with serving(config=config, ready=False) as bed:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await official(bed, "wrong").messages.create(model="", max_tokens=1, messages=HI)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with pytest.raises(anthropic.InternalServerError) as loading:
            await official(bed, "secret").messages.create(model="", max_tokens=1, messages=HI)
        assert loading.value.status_code == 503
        assert loading.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    async with serving() as bed:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await official(bed).messages.create(model="other", max_tokens=1, messages=HI)
        assert "'tiny'" in unknown.value.message and unknown.value.request_id
        for method, path, status in (("GET", PATH, 405), ("POST", f"{PATH}/nothing", 404)):
            response = await bed.client.request(method, path)
            assert (response.status_code, response.json()["type"]) == (status, "error")


async def stream(bed: Bed) -> "anthropic.types.Message":
    async with official(bed).messages.stream(model="", max_tokens=200, messages=HI) as stream:
        return await stream.get_final_message()


async def test_a_failure_behind_the_first_byte_is_an_error_event():
    import anthropic

    async with serving(lambda submit: [120] * 1000, pace=0.002) as bed:
        streaming = asyncio.create_task(stream(bed))
        await until(lambda: bed.engine.num_running)
        bed.engine.die()
        with pytest.raises(anthropic.APIStatusError) as caught:
            await streaming
        assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_abort_ends_a_message():
    async with serving(lambda submit: [120] * 1000, pace=0.002) as bed:
        streaming = asyncio.create_task(stream(bed))
        await until(lambda: bed.engine.num_running)
        assert (await bed.client.post("/abort", json={"all": True})).json() == {"aborted": 1}
        assert (await streaming).stop_reason == "abort"
        assert bed.engine.num_running == 0
