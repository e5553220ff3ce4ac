"""Long texts of every field: refused before they are encoded, or worked on in a thread."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from minidsa.server.completions import TAIL
from minidsa.server.long_text import LONG_TEXT, in_thread_if_long
from minidsa.server.tokenizer import Tokenizer
from scripted_engine import INFO, Bed, serving
from sse_reader import post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WIDE = msgspec.structs.replace(INFO, max_model_len=10**6, num_cache_tokens=10**6)
LONG = "word " * 20_000
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{LONG}"}}'}}
THOUGHTS = {"role": "assistant", "reasoning": LONG, "content": "", "prefix": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "content": (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    "many messages": (CHAT, {"messages": [{"role": "user", "content": "word"}] * 5000}),
    "reasoning": (CHAT, {"messages": [HI, THOUGHTS], "thinking": True}),
    "tools": (CHAT, {"messages": [HI], "tools": [TOOL]}),
    "arguments": (
        CHAT,
        {
            "messages": [
                HI,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "x", "tool_call_id": "c"},
            ]
        },
    ),
    "prompt": (COMPLETIONS, {"prompt": LONG}),
    "many prompts": (COMPLETIONS, {"prompt": ["word " * 600] * 40}),
    "suffix": (COMPLETIONS, {"prompt": "a", "suffix": LONG}),
    "echo of text": (COMPLETIONS, {"prompt": LONG, "echo": True}),
    "echo of ids": (COMPLETIONS, {"prompt": [300] * 50_000, "echo": True}),
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", {"messages": [HI], "tools": [TOOL]}),
    "detokenize": ("/detokenize", {"tokens": [300] * 50_000}),
}


class TextWork:
    """How often the tokenizer was asked, on the event loop's thread and beside it."""

    on_loop = 0
    beside = 0


@pytest.fixture
def text_work(monkeypatch) -> TextWork:
    count = TextWork()
    loop_thread = threading.get_ident()

    def watch(name: str) -> None:
        work = getattr(Tokenizer, name)

        def watched(self: Tokenizer, *arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == loop_thread:
                count.on_loop += 1
            else:
                count.beside += 1
            return work(self, *arguments, **named)

        monkeypatch.setattr(Tokenizer, name, watched)

    for name in ("encode_text", "encode_runs", "decode", "token_bytes", "token_text"):
        watch(name)
    return count


@pytest.mark.parametrize("name", CASES)
async def test_abu_09_long_texts_are_worked_on_beside_the_event_loop(name, text_work):
    path, body = CASES[name]
    async with serving(info=WIDE) as bed:
        if path in (CHAT, COMPLETIONS):
            await _until_submitted(bed, path, body | {"max_tokens": 1, "stream": True})
        else:
            assert (await post(bed, path, **body)).is_success
        assert text_work.beside > 0
        # The end of each prompt is read to go on with a character that it breaks off.
        assert text_work.on_loop <= TAIL * len(bed.engine.submits)


async def _until_submitted(bed: Bed, path: str, body: dict[str, Any]) -> None:
    bed.engine.held = True
    running = asyncio.create_task(post(bed, path, **body))
    while not bed.engine.submits and not running.done():
        await asyncio.sleep(0.005)
    bed.engine.die()
    assert (await running).status_code == 200


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("many prompts", "detokenize")]
)
async def test_texts_that_cannot_fit_are_refused_before_they_are_encoded(name, text_work):
    path, body = CASES[name]
    async with serving() as bed:
        answer = await post(bed, path, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is 256 tokens" in error["message"]
        assert text_work.beside == text_work.on_loop == 0


async def test_thoughts_that_the_prompt_leaves_out_do_not_count():
    async with serving() as bed:
        old = {"role": "assistant", "reasoning": LONG, "content": "yes"}
        answer = await post(bed, CHAT, messages=[HI, old, HI], max_tokens=1)
        assert answer.status_code == 200


async def test_detokenize_has_a_bound():
    async with serving() as bed:
        most = bed.service.config.limits.max_request_tokens
        answer = await post(bed, "/detokenize", tokens=[1] * (most + 1))
        assert answer.json()["error"]["param"] == "tokens"


async def test_long_scores_are_written_beside_the_event_loop(text_work):
    async with serving(lambda submit: [0], info=WIDE) as bed:
        body = {"prompt": [300] * 2000, "max_tokens": 0, "echo": True, "logprobs": 5}
        assert (await post(bed, COMPLETIONS, **body)).is_success
        assert (await post(bed, COMPLETIONS, stream=True, **body)).is_success
        assert text_work.beside > 10_000 and text_work.on_loop <= 2 * TAIL


async def test_errors_of_long_work_reach_the_caller():
    def fail(text: str) -> None:
        raise ValueError(text)

    for size in (LONG_TEXT - 1, LONG_TEXT):
        with pytest.raises(ValueError, match="here"):
            await in_thread_if_long(size, fail, "here")
