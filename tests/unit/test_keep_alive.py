"""Comment lines in silent streams: none unless asked for, and no token lost to them."""

import asyncio

import pytest

from scripted_engine import Bed, server_config, serving
from sse_reader import read_events

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
COMMENT = ": keep-alive\n\n"


async def text_after_silence(bed: Bed, seconds: float) -> str:
    """A stream whose engine makes no step for a while."""
    bed.engine.held = True
    asking = asyncio.create_task(bed.client.post(CHAT, json=BODY))
    await asyncio.sleep(seconds)
    bed.engine.held = False
    return (await asking).text


@pytest.mark.parametrize(("interval", "has_comments"), [(0.0, False), (0.02, True)])
async def test_comments_come_in_silence_if_asked_for(interval, has_comments):
    async with serving(
        lambda submit: [120] * 9, config=server_config(sse_keep_alive_interval=interval)
    ) as bed:
        text = await text_after_silence(bed, 0.3)
        assert (COMMENT in text) == has_comments
        rest = text.replace(COMMENT, "")
        assert ":" not in [line[:1] for line in rest.splitlines()]
        shown = "".join(c["choices"][0]["delta"].get("content") or "" for c in read_events(rest))
        assert shown == bed.tokenizer.decode([120] * 5)


async def test_a_client_that_leaves_in_silence_frees_its_place():
    config = server_config(sse_keep_alive_interval=0.02)
    async with serving(lambda submit: [120] * 9, config=config) as bed:
        bed.engine.held = True
        asking = asyncio.create_task(bed.client.post(CHAT, json=BODY))
        while not bed.engine.submits:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        bed.engine.held = False
        answer = await bed.client.post(CHAT, json=BODY)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert bed.engine.num_running == 0
