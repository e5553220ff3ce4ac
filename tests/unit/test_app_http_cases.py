"""What must hold for any rhythm of tokens: one a step, or several as drafts bring them."""

import asyncio
import json
import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from minidsa.scheduler.messages import Submit
from minidsa.server.chat_formats import JinjaFormat
from minidsa.server.chat_template import ChatTemplate
from minidsa.server.tokenizer_files import TokenizerSettings
from scripted_engine import CONTEXT, EOS, INFO, VOCAB, Bed, serving
from sse_reader import both, post
from tokenizers_small import small_tokenizer
from written_answers import write

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
WIDE = msgspec.structs.replace(INFO, max_model_len=4096)
RHYTHMS = pytest.mark.parametrize("burst", [1, 4])
WORDS = ("“so”", "it's", '"a"', "'b'", "x", " ", "\n", "né", "中文", "😀", "`c`", "«d»")


def quoted_text(submit: Submit) -> Iterable[int]:
    """Words and quotes, chosen by the prompt."""
    words = random.Random(sum(submit.prompt_ids)).choices(WORDS, k=20)
    return [*small_tokenizer(VOCAB).encode_runs([" ".join(words)]), EOS]


@RHYTHMS
async def test_http_12_streams_lose_no_words_next_to_quotes(burst):
    async with serving(quoted_text, burst=burst, info=WIDE) as bed:

        async def compare(number: int) -> None:
            fields = {"max_tokens": 300, "seed": number, "return_token_ids": True}
            answers = await both(bed, COMPLETIONS, prompt=f"prompt {number}", **fields)
            ids = answers[0]["ids"]
            assert answers[0]["content"] == bed.tokenizer.decode(ids[:-1])

        for start in range(0, 200, 20):
            await asyncio.gather(*(compare(start + i) for i in range(20)))


@RHYTHMS
@pytest.mark.parametrize("ids", [True, False])
async def test_http_13_stops_hold_in_every_form(burst, ids):
    text = "one two END three"
    fields = {"max_tokens": 100, "return_token_ids": ids}
    async with serving(write(text, EOS), burst=burst) as bed:
        answers = await both(bed, COMPLETIONS, prompt="x", stop="END", **fields)
        assert answers[0]["content"] == "one two "
        assert (answers[0]["finish_reason"], answers[0]["stop_reason"]) == ("stop", "END")
        stop_id = bed.ids(text)[5]
        answers = await both(bed, COMPLETIONS, prompt="x", stop_token_ids=[stop_id], **fields)
        assert (answers[0]["finish_reason"], answers[0]["stop_reason"]) == ("stop", stop_id)
        assert answers[0]["content"] == bed.tokenizer.decode(bed.ids(text)[:5])
        if ids:
            assert answers[0]["ids"] == bed.ids(text)[:6]


async def test_http_14_logprobs_are_those_of_single_steps():
    found = []
    for burst in (1, 4):
        async with serving(write("one two three", EOS), burst=burst) as bed:
            fields = {"max_tokens": 10, "logprobs": True, "top_logprobs": 20}
            answers = await both(bed, CHAT, messages=HI, **fields)
            found.append(answers[0]["logprobs"]["content"])
    assert found[0] == found[1]
    for entry in found[0]:
        total = sum(math.exp(top["logprob"]) for top in entry["top_logprobs"])
        assert 0 < total < 1 and entry["logprob"] < 0


INVOKE = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n'
    '<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]


@RHYTHMS
async def test_http_15_a_loop_of_two_tool_calls(burst):
    def play(submit: Submit) -> Iterable[int]:
        told = small_tokenizer(VOCAB).decode(submit.prompt_ids)
        name = "time" if "<result>" in told else "weather"
        return write(INVOKE.format(name=name, city="Oslo"), EOS)(submit)

    async with serving(play, burst=burst, info=WIDE) as bed:
        messages: list[dict[str, Any]] = list(HI)
        ids = []
        for name in ("weather", "time"):
            # Streamed and whole name the call alike: `both` compares them.
            (call,) = (await both(bed, CHAT, messages=messages, tools=TOOLS))[0]["calls"].values()
            assert call["name"] == name and json.loads(call["arguments"]) == {"city": "Oslo"}
            ids.append(call["id"])
            function = {"name": name, "arguments": call["arguments"]}
            sent = {"id": call["id"], "type": "function", "function": function}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
            messages += [{"role": "assistant", "content": None, "tool_calls": [sent]}, result]
        assert len(set(ids)) == 2


async def test_http_15_a_template_whose_calls_are_not_read_refuses_tools():
    async with serving() as bed:
        template = ChatTemplate({"default": "{{ messages }}"}, {}, TokenizerSettings())
        object.__setattr__(bed.service, "chat_format", JinjaFormat(template))
        error = (await post(bed, CHAT, messages=HI, tools=TOOLS)).json()["error"]
        assert error["param"] == "tools" and "template" in error["message"]


async def _length(bed: Bed, path: str, **fields: Any) -> Any:
    body = {"messages": HI} if path == CHAT else {"prompt": [120] * 10}
    answer = (await post(bed, path, **body, **fields)).json()
    if "error" in answer:
        return answer["error"]
    return answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_http_17_every_length_is_answered(path, field):
    async with serving() as bed:
        prompt = len(bed.ids("hi")) + 4 if path == CHAT else 10
        rest = CONTEXT - prompt
        default = await _length(bed, path)
        assert default == (rest if path == CHAT else 16)
        assert await _length(bed, path, **{field: None}) == default
        assert await _length(bed, path, **{field: 1}) == 1
        assert await _length(bed, path, **{field: rest}) == rest
        above = await _length(bed, path, **{field: rest + 1})
        assert above["code"] == "context_length_exceeded"
        assert above["param"] == ("messages" if path == CHAT else "prompt")
        beyond = await _length(bed, path, **{field: CONTEXT + 1})
        assert (beyond["code"], beyond["param"]) == ("context_length_exceeded", field)
        assert f"maximum context length is {CONTEXT} tokens" in beyond["message"]
        assert f"{field} is {CONTEXT + 1}" in beyond["message"]
        assert (await _length(bed, path, **{field: 0}))["param"] == field
        assert await _length(bed, path) == default
