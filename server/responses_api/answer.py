"""Answers of the Responses API: `response` objects and the numbered events of their streams."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..answers import TokenLogprob, Usage, encode, encode_named
from ..blocks import Act, Block, BlockList
from ..bodies import Body
from ..errors import ApiError
from ..logprobs import chat_logprobs
from ..sequence import Shown, TextScore, Update
from ..tokenizer import Tokenizer
from .protocol import ResponsesRequest

_PREFIXES = MappingProxyType({"reasoning": "rs", "text": "msg", "call": "fc"})
_STREAMS = MappingProxyType(
    {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
)
Keep = Callable[[bytes, Sequence[Block]], None]


class ResponseRenderer:
    """A `generation.Renderer` of one response; `keep` gets it when it is complete, to store it."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        call_key: str,
        body: Body[ResponsesRequest],
        keep: Keep | None,
        tokenizer: Tokenizer,
    ) -> None:
        self._id = answer_id
        self._model = model
        self._body = body
        self._keep = keep
        self._created = int(time.time())
        self._list = BlockList(f"call_{call_key}")
        self._tokenizer = tokenizer
        self._scores: dict[int, list[TokenLogprob]] = {}
        self._number = 0
        self._finish: str | None = None

    def opening(self, count: Callable[[], Usage]) -> bytes:
        response = self._response("in_progress", [], None)
        started = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=response) for name in started)

    def step(self, updates: Mapping[int, Update], count: Callable[[], Usage]) -> bytes:
        events = []
        for update in updates.values():
            for change in self._changes(update):
                events += self._change(*change)
            self._finish = update.finish_reason or self._finish
        return b"".join(events)

    def closing(self, count: Callable[[], Usage]) -> bytes:
        closing = [(*change, []) for change in self._list.close()]
        events = [event for change in closing for event in self._change(*change)]
        response = self._final(count())
        self._store(response)
        return b"".join([*events, self._event(f"response.{self._status}", response=response)])

    def failure(self, error: ApiError) -> bytes:
        self._finish = "failed"
        response = self._response("failed", self._items(), None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def whole(self, updates: Sequence[Update], usage: Usage) -> dict[str, Any]:
        for update in updates:
            for _ in self._changes(update):
                pass
            self._finish = update.finish_reason
        response = self._final(usage)
        self._store(response)
        return response

    def _changes(self, update: Update) -> Iterator[tuple[Act, Block, str, list[TokenLogprob]]]:
        """What an update changes, with the scores that come with a text that grows."""
        for part in update.parts:
            scores = part.scores if isinstance(part, Shown) else ()
            for act, block, text in self._list.feed((part,)):
                is_scored = act == "grow" and scores
                yield act, block, text, self._scored(block, scores) if is_scored else []

    def _scored(self, block: Block, scores: Sequence[TextScore]) -> list[TokenLogprob]:
        ids, entries = [score.token_id for score in scores], [score.logprobs for score in scores]
        fresh = chat_logprobs(self._tokenizer, ids, entries).content
        self._scores.setdefault(block.index, []).extend(fresh)
        return fresh

    @property
    def _status(self) -> str:
        return "completed" if self._finish in ("stop", "tool_calls") else "incomplete"

    def _store(self, response: dict[str, Any]) -> None:
        if self._keep is not None:
            self._keep(encode(response), self._list.blocks)

    def _final(self, usage: Usage) -> dict[str, Any]:
        response = self._response(self._status, self._items(), _usage(usage))
        if self._status == "incomplete":
            reason = "max_output_tokens" if self._finish == "length" else self._finish
            response["incomplete_details"] = {"reason": reason}
        return response

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        request, document = self._body.fields, self._body.document
        effort = None if request.reasoning is None else request.reasoning.effort
        shape = None if request.text is None else request.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": document["metadata"] if isinstance(document.get("metadata"), dict) else {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": self._keep is not None,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": shape or {"type": "text"}},
            "tool_choice": document.get("tool_choice") or "auto",
            "tools": document.get("tools") or [],
            "top_logprobs": request.top_logprobs,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

    def _items(self) -> list[dict[str, Any]]:
        blocks = self._list.blocks
        return [self._item(block, self._end_of(block), block.text) for block in blocks]

    def _end_of(self, block: Block) -> str:
        """Only the last block can be cut, and only by the end of the answer."""
        is_last = self._finish is not None and block is self._list.blocks[-1]
        return self._status if is_last else "completed"

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: str, text: str | None) -> dict[str, Any]:
        """A block as an item of the output; a text of None is one that has not begun."""
        content = [] if text is None else [self._part(block, text)]
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "reasoning":
                shown = {"summary": [], "content": content, "encrypted_content": None}
                return {**item, "type": "reasoning", **shown}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
        call = {"call_id": block.call_id, "name": block.name, "arguments": text or ""}
        return {**item, "type": "function_call", **call}

    def _change(self, act: Act, block: Block, text: str, scores: list[TokenLogprob]) -> list[bytes]:
        place = {"output_index": block.index}
        named = {"item_id": self._item_id(block), **place}
        if block.kind != "call":
            named["content_index"] = 0
        match act:
            case "open":
                item = self._item(block, "in_progress", None)
                return [
                    self._event("response.output_item.added", item=item, **place),
                    *self._part_event("added", block, "", named),
                ]
            case "grow":
                fields = named | ({"logprobs": scores} if block.kind == "text" else {})
                return [self._event(f"{_stream_of(block)}.delta", delta=text, **fields)]
            case "close":
                return self._closed(block, named)

    def _closed(self, block: Block, named: dict[str, Any]) -> list[bytes]:
        done: dict[str, Any] = {"text": block.text}
        if block.kind == "call":
            done = {"arguments": block.text, "name": block.name}
        if block.kind == "text":
            done["logprobs"] = self._scores.get(block.index, [])
        item = self._item(block, self._end_of(block), block.text)
        return [
            self._event(f"{_stream_of(block)}.done", **done, **named),
            *self._part_event("done", block, block.text, named),
            self._event("response.output_item.done", item=item, output_index=block.index),
        ]

    def _part_event(self, name: str, block: Block, text: str, named: dict[str, Any]) -> list[bytes]:
        if block.kind == "call":
            return []
        part = self._part(block, text)
        return [self._event(f"response.content_part.{name}", part=part, **named)]

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        scores = self._scores.get(block.index, [])
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        numbered = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return encode_named(name, numbered)


def _stream_of(block: Block) -> str:
    return f"response.{_STREAMS[block.kind]}"


def _usage(usage: Usage) -> dict[str, Any]:
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
