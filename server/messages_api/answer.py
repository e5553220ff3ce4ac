"""Answers of the Messages API: `message` objects and the events of their streams."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..answers import Usage, encode_named
from ..blocks import Act, Block, BlockList
from ..errors import ApiError
from ..sequence import Part, Shown, Update
from .errors import error_body

_STOP_REASONS = MappingProxyType({"length": "max_tokens", "tool_calls": "tool_use"})


class MessageRenderer:
    """A `generation.Renderer` of one message. Thoughts that are not shown leave no block."""

    def __init__(
        self, answer_id: str, model: str, request_id: str, call_key: str, shows_thoughts: bool
    ) -> None:
        self._id = answer_id
        self._model = model
        self._request_id = request_id
        self._shows_thoughts = shows_thoughts
        self._list = BlockList(f"toolu_{call_key}")
        self._finish: tuple[str | None, int | str | None] = None, None

    def opening(self, count: Callable[[], Usage]) -> bytes:
        return _event("message_start", message=self._message([], count()))

    def step(self, updates: Mapping[int, Update], count: Callable[[], Usage]) -> bytes:
        events = []
        for update in updates.values():
            events += [_change(*change) for change in self._list.feed(self._parts(update))]
            if update.finish_reason is not None:
                self._finish = update.finish_reason, update.stop_reason
        return b"".join(events)

    def closing(self, count: Callable[[], Usage]) -> bytes:
        ends = [_change(*change) for change in self._list.close()]
        end = _event("message_delta", delta=self._end(), usage=_usage(count()))
        return b"".join([*ends, end, _event("message_stop")])

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._request_id) + b"\n\n"

    def whole(self, updates: Sequence[Update], usage: Usage) -> dict[str, Any]:
        for update in updates:
            for _ in self._list.feed(self._parts(update)):
                pass
            self._finish = update.finish_reason, update.stop_reason
        return self._message([_whole(block) for block in self._list.blocks], usage)

    def _parts(self, update: Update) -> list[Part]:
        if self._shows_thoughts:
            return update.parts
        return [
            part for part in update.parts if not (isinstance(part, Shown) and part.is_reasoning)
        ]

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._end(),
            "usage": _usage(usage),
        }

    def _end(self) -> dict[str, Any]:
        reason, stop = self._finish
        if reason == "stop":
            reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        else:
            reason = _STOP_REASONS.get(reason or "", reason)
        return {"stop_reason": reason, "stop_sequence": stop if isinstance(stop, str) else None}


def _usage(usage: Usage) -> dict[str, int]:
    """Cached tokens are not among the input tokens of this API."""
    cached = usage.prompt_cache_hit_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _whole(block: Block) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text, "citations": None}
    arguments = block.arguments()
    # A call that was cut has no arguments yet; what there is must not look like a whole call.
    given = {"partial_json": block.text} if arguments is None else arguments
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _change(act: Act, block: Block, text: str) -> bytes:
    if act == "open":
        empty = Block(block.kind, block.index, name=block.name, call_id=block.call_id)
        shown = _whole(empty)
        if block.kind == "call":
            shown["input"] = {}
        return _event("content_block_start", index=block.index, content_block=shown)
    if act == "close":
        return _event("content_block_stop", index=block.index)
    match block.kind:
        case "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        case "text":
            delta = {"type": "text_delta", "text": text}
        case "call":
            delta = {"type": "input_json_delta", "partial_json": text}
    return _event("content_block_delta", index=block.index, delta=delta)


def _event(name: str, **fields: Any) -> bytes:
    return encode_named(name, {"type": name, **fields})
