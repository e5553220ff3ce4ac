"""Reads streamed answers strictly, and joins their pieces into what a whole answer says."""

import json
from typing import Any

import httpx

from scripted_engine import Bed

DONE = "data: [DONE]"


def read_events(text: str) -> list[dict[str, Any]]:
    """The JSON of every event; asserts the framing: `data: ` lines, blank lines, one [DONE]."""
    assert text.endswith("\n\n") and "\r" not in text
    lines = text[:-2].split("\n\n")
    assert lines[-1] == DONE
    for line in lines:
        assert line.startswith("data: ") and "\n" not in line
    return [json.loads(line[6:], parse_constant=_refuse) for line in lines[:-1]]


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


async def post(bed: Bed, path: str, **body: Any) -> httpx.Response:
    return await bed.client.post(path, json=body)


async def stream(bed: Bed, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    response = await bed.client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return read_events(response.text)


def join(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By index: the text, the ids, the logprobs and the end that the chunks add up to."""
    answers: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            answer = answers.setdefault(
                choice["index"],
                {"content": "", "reasoning": "", "calls": {}, "ids": [], "logprobs": {}},
            )
            assert "finish_reason" not in answer, "a chunk came behind the end"
            _add(answer, choice)
    return answers


def _add(answer: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {"content": choice.get("text")})
    answer["content"] += delta.get("content") or ""
    answer["reasoning"] += delta.get("reasoning") or ""
    assert delta.get("reasoning") == delta.get("reasoning_content")
    for call in delta.get("tool_calls", ()):
        found = answer["calls"].setdefault(call["index"], {"arguments": ""})
        found |= {key: call[key] for key in ("id", "type") if key in call}
        if "name" in call["function"]:
            found["name"] = call["function"]["name"]
        found["arguments"] += call["function"]["arguments"]
    answer["ids"] += choice.get("token_ids") or []
    for key, values in (choice["logprobs"] or {}).items():
        answer["logprobs"].setdefault(key, []).extend(values)
    if choice["finish_reason"] is not None:
        assert choice["finish_reason"] != ""
        answer["finish_reason"] = choice["finish_reason"]
        answer["stop_reason"] = choice["stop_reason"]


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A whole answer in the form of `join`."""
    answers = {}
    for choice in answer["choices"]:
        message = choice.get("message", {"content": choice.get("text")})
        assert message.get("reasoning") == message.get("reasoning_content")
        answers[choice["index"]] = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning") or "",
            "calls": {
                index: {"id": call["id"], "type": call["type"], **call["function"]}
                for index, call in enumerate(message.get("tool_calls", ()))
            },
            "ids": choice.get("token_ids") or [],
            "logprobs": choice["logprobs"] or {},
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
    return answers


async def both(bed: Bed, path: str, **body: Any) -> dict[int, dict[str, Any]]:
    """The answer of a request, which is the same streamed and whole, usage included."""
    body = {"seed": 11} | body
    answer = (await post(bed, path, **body)).json()
    assert "choices" in answer, answer
    options = {"include_usage": True}
    chunks = await stream(bed, path, **body, stream_options=options)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer["usage"]
    joined = join(chunks)
    assert joined == whole(answer)
    return joined
