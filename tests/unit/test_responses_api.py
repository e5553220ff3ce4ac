"""OpenAI's Responses API over a scripted engine, through the official client."""

import asyncio
import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai.types.responses import Response

from minidsa.configs.server import LimitsConfig
from patience import until
from scripted_engine import EOS, INFO, Bed, server_config, serving
from written_answers import CALL, write

PATH = "/v1/responses"
WIDE = msgspec.structs.replace(INFO, max_model_len=4096)
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        "strict": False,
    }
]
RANDOM = {"id", "created_at", "output"}


def official(bed: Bed) -> openai.AsyncOpenAI:
    """The official client over the bed's application; it reads a stream once that has ended."""
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(bed.app))
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="x", max_retries=0, http_client=http
    )


def items(response: Response) -> list[dict[str, Any]]:
    """The output without the ids, which are made from the response's own."""
    return [item.model_dump(exclude={"id", "parsed_arguments"}) for item in response.output]


async def ask(bed: Bed, **fields: Any) -> Response:
    """The answer, which is the same streamed and whole but for its ids."""
    body: dict[str, Any] = {"model": "tiny", "input": "hi"} | fields
    whole = await official(bed).responses.create(**body)
    events = [event async for event in await official(bed).responses.create(stream=True, **body)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert items(last.response) == items(whole)
    assert last.response.model_dump(exclude=RANDOM) == whole.model_dump(exclude=RANDOM)
    return whole


def prompt_text(bed: Bed) -> str:
    return bed.tokenizer.decode(bed.engine.submits[-1].prompt_ids)


async def chat_prompt(bed: Bed, **body: Any) -> list[int]:
    answer = await bed.client.post("/tokenize", json=body)
    return answer.json()["tokens"]


@pytest.mark.parametrize("burst", [1, 5, 100])
async def test_api_100_text(burst):
    async with serving(write("hello there", EOS), burst=burst) as bed:
        answer = await ask(bed, metadata={"a": "b"})
        assert answer.output_text == "hello there"
        assert answer.id.startswith("resp_") and answer.status == "completed"
        assert answer.metadata == {"a": "b"} and answer.error is None
        prompt = await chat_prompt(bed, messages=[{"role": "user", "content": "hi"}])
        assert bed.engine.submits[-1].prompt_ids == prompt
        assert answer.usage is not None
        assert answer.usage.input_tokens == len(prompt)
        assert answer.usage.output_tokens == len(bed.ids("hello there")) + 1
        async with official(bed).responses.stream(model="tiny", input="hi") as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == "hello there"


@pytest.mark.parametrize("burst", [1, 7, 100])
async def test_api_100_thoughts_text_and_calls_in_order(burst):
    script = write("hm", "</think>", "I add.", CALL.format(note='x"y'), "\nDone.", EOS)
    async with serving(script, burst=burst, info=WIDE) as bed:
        answer = await ask(bed, tools=TOOLS, reasoning={"effort": "high", "summary": "auto"})
        kinds = [item.type for item in answer.output]
        assert kinds == ["reasoning", "message", "function_call", "message"]
        thoughts, _, call, _ = items(answer)
        assert thoughts["content"] == [{"text": "hm", "type": "reasoning_text"}]
        assert json.loads(call["arguments"]) == {"a": 2, "note": 'x"y'}
        assert (call["name"], answer.output_text) == ("add", "I add.\nDone.")
        assert answer.usage and answer.usage.output_tokens_details.reasoning_tokens > 0


async def test_the_events_of_a_stream_are_named_and_in_order():
    async with serving(write("hm", "</think>", "ab", CALL.format(note="n"), EOS), info=WIDE) as bed:
        body = {"input": "hi", "tools": TOOLS, "stream": True, "reasoning": {"effort": "low"}}
        text = (await bed.client.post(PATH, json=body)).text
        names = []
        for event in text.removesuffix("\n\n").split("\n\n"):
            first, second = event.split("\n")
            data = json.loads(second.removeprefix("data: "))
            assert first == f"event: {data['type']}"
            names.append(data["type"].removeprefix("response."))
        merged = [name for place, name in enumerate(names) if name != names[place - 1]]
        assert merged == [
            *("created", "in_progress"),
            *("output_item.added", "content_part.added", "reasoning_text.delta"),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]


@pytest.mark.parametrize("burst", [1, 3, 100])
async def test_logprobs_of_the_text_stand_beside_it(burst):
    """Behind thoughts, before a call and behind it, streamed and whole."""
    script = write("hm", "</think>", "I add.", CALL.format(note="n"), "\nDone.", EOS)
    wanted: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with serving(script, burst=burst, info=WIDE) as bed:
        fields = wanted | {"tools": TOOLS, "reasoning": {"effort": "high"}}
        answer: Any = await ask(bed, **fields)
        first, last = (i.content[0] for i in answer.output if i.type == "message")
        assert b"".join(bytes(score.bytes) for score in first.logprobs) == b"I add."
        assert all(len(score.top_logprobs) == 2 for score in first.logprobs)
        assert first.logprobs[0].logprob == -1.5
        assert b"".join(bytes(score.bytes) for score in last.logprobs).endswith(b"Done.")
        events = [e async for e in await official(bed).responses.create(
            model="tiny", input="hi", stream=True, **fields
        )]  # fmt: skip
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        streamed = [score.token for event in deltas for score in event.logprobs]
        assert streamed == [score.token for part in (first, last) for score in part.logprobs]
        done = [e for e in events if e.type == "response.output_text.done"]
        assert [score.token for event in done for score in event.logprobs] == streamed
        bare: Any = await ask(bed, tools=TOOLS, reasoning={"effort": "high"})
        assert all(i.content[0].logprobs == [] for i in bare.output if i.type == "message")


async def test_a_cut_answer_is_incomplete():
    async with serving(write("a b c d e f")) as bed:
        answer = await ask(bed, max_output_tokens=3)
        assert answer.status == "incomplete" and answer.incomplete_details
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert items(answer)[-1]["status"] == "incomplete"


async def test_a_stateless_loop_sends_every_item_back():
    script = write("hm", "</think>", CALL.format(note="n"), EOS)
    async with serving(script, info=WIDE) as bed:
        first = await ask(
            bed, tools=TOOLS, store=False, reasoning={"effort": "low"},
            include=["reasoning.encrypted_content"], instructions="be brief",
        )  # fmt: skip
        call: Any = first.output[-1]
        sent = [item.model_dump(exclude_none=True) for item in first.output]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        user = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        await ask(
            bed, tools=TOOLS, store=False, reasoning={"effort": "low"},
            input=[user, *sent, result], instructions="be brief",
        )  # fmt: skip
        function = {key: TOOLS[0][key] for key in ("name", "description", "parameters", "strict")}
        called = {"name": "add", "arguments": call.arguments}
        assert bed.engine.submits[-1].prompt_ids == await chat_prompt(
            bed,
            tools=[{"type": "function", "function": function}],
            thinking=True,
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "reasoning": "hm",
                    "tool_calls": [{"id": call.call_id, "type": "function", "function": called}],
                },
                {"role": "tool", "tool_call_id": call.call_id, "content": "5"},
            ],
        )
        assert "<result>5</result>" in prompt_text(bed)


@pytest.mark.parametrize("stream", [True, False])
async def test_stored_responses_are_continued(stream):
    async with serving(write("hello", EOS), info=WIDE) as bed:

        async def create(**fields: Any) -> str:
            answer = await bed.client.post(PATH, json={"stream": stream} | fields)
            if not stream:
                return answer.json()["id"]
            return json.loads(answer.text.split("data: ")[-1])["response"]["id"]

        developer = {"role": "developer", "content": "short"}
        user = {"role": "user", "content": "one"}
        first = await create(input=[developer, user], instructions="old")
        assert "old\n\nshort<｜User｜>one" in prompt_text(bed)
        second = await create(input="two", previous_response_id=first)
        await create(input="three", previous_response_id=second, instructions="new")
        turns = [
            {"role": "system", "content": "new\n\nshort"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "three"},
        ]
        assert bed.engine.submits[-1].prompt_ids == await chat_prompt(bed, messages=turns)
        # Two answers may continue one response, each on its own.
        await create(input="other", previous_response_id=first)
        assert "two" not in prompt_text(bed)

        client = official(bed).responses
        read = await client.retrieve(first)
        assert (read.id, read.output_text, read.status) == (first, "hello", "completed")
        listed = [item async for item in client.input_items.list(first)]
        assert [item.role for item in listed] == ["developer", "user"]  # type: ignore[union-attr]
        await client.delete(first)
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(first)
        # What goes on from it still does.
        await create(input="four", previous_response_id=second)
        assert "one<｜Assistant｜>" in prompt_text(bed)


async def test_the_store_is_bounded_and_can_be_off():
    config = server_config(limits=LimitsConfig(max_stored_bytes=6000))
    async with serving(write("hello", EOS), config=config) as bed:
        ids = [(await bed.client.post(PATH, json={"input": "x"})).json()["id"] for _ in range(5)]
        found = [(await bed.client.get(f"{PATH}/{name}")).status_code for name in ids]
        assert found[0] == 404 and found[-1] == 200
        lost = await bed.client.post(PATH, json={"input": "x", "previous_response_id": ids[0]})
        assert lost.status_code == 400
        assert lost.json()["error"]["code"] == "previous_response_not_found"
        unkept = (await bed.client.post(PATH, json={"input": "x", "store": False})).json()
        assert unkept["store"] is False
        assert (await bed.client.get(f"{PATH}/{unkept['id']}")).status_code == 404
    config = server_config(limits=LimitsConfig(max_stored_bytes=0))
    async with serving(write("hello", EOS), config=config) as bed:
        assert (await bed.client.post(PATH, json={"input": "x"})).json()["store"] is False
        refused = await bed.client.post(PATH, json={"input": "x", "store": True})
        assert refused.json()["error"]["param"] == "store"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input.0.content"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input.0"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": 3.0}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ({"reasoning": {"effort": "wild"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"format": {"type": "nonsense"}}}, "text.format.type"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "x"}, "conversation"),
    ({"include": ["file_search_call.results"]}, "include.0"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_mistakes_are_told_by_the_paths_of_this_api(fields, param):
    async with serving() as bed:
        response = await bed.client.post(PATH, json={"input": "hi"} | fields)
        error = response.json()["error"]
        assert response.status_code == 400 and set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert bed.engine.seen == []


async def test_a_failure_behind_the_first_byte_is_an_event():
    async with serving(lambda submit: [120] * 1000, pace=0.002) as bed:
        body = {"input": "hi", "stream": True}
        streaming = asyncio.create_task(bed.client.post(PATH, json=body))
        await until(lambda: bed.engine.num_running)
        bed.engine.die()
        event, data = (await streaming).text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
        assert event == "event: response.failed"
        failed = json.loads(data.removeprefix("data: "))["response"]
        assert failed["status"] == "failed" and failed["error"]["message"]


async def test_an_aborted_response_is_incomplete():
    async with serving(lambda submit: [120] * 1000, pace=0.002) as bed:
        headers = {"x-request-id": "mine"}
        running = asyncio.create_task(bed.client.post(PATH, json={"input": "hi"}, headers=headers))
        await until(lambda: bed.engine.num_running)
        done = await bed.client.post("/abort", json={"request_id": "mine"})
        assert done.json() == {"aborted": 1}
        answer = (await running).json()
        assert (answer["id"], answer["status"]) == ("resp_mine", "incomplete")
        assert answer["incomplete_details"] == {"reason": "abort"}
