"""From a Responses request, and the conversation before it, to the chat that says the same."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..blocks import Block
from ..bodies import Body
from ..chat_protocol import ChatRequest
from ..errors import invalid_value
from ..long_text import in_thread_if_long
from ..readdress import Addresses, readdressed
from ..validation import validate
from .protocol import CallItem, Item, MessageItem, ReasoningItem, ResponsesRequest, ResultItem, Tool
from .store import Stored

_RENAMED = (
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
)


class Translated(NamedTuple):
    """The chat request, where its fields stand in the body, and the chat without instructions."""

    chat: Body[ChatRequest]
    addresses: Addresses
    conversation: list[dict[str, Any]]


async def to_chat(body: Body[ResponsesRequest], previous: Stored | None) -> Translated:
    """The chat that a request asks for; raises ApiError."""
    size = body.size + (0 if previous is None else previous.size)
    return await in_thread_if_long(size, _to_chat, body, previous, size)


def _to_chat(body: Body[ResponsesRequest], previous: Stored | None, size: int) -> Translated:
    request = body.fields
    turns = _Turns(() if previous is None else previous.messages)
    for index, item in enumerate(request.input):
        turns.add(f"input.{index}", item)
    messages, origins = turns.instructed(request.instructions)
    document = {"model": request.model, "messages": messages, **_options(request)}
    addresses = [
        *((f"messages.{index}", origin) for index, origin in enumerate(origins)),
        *((f"tools.{index}.function", f"tools.{index}") for index in range(len(request.tools))),
        *_RENAMED,
    ]
    with readdressed(addresses):
        fields = validate(ChatRequest, document)
    return Translated(Body(fields, document, size), addresses, turns.messages)


class _Turns:
    """Chat messages, and where each comes from. Items of one answer become one message again."""

    def __init__(self, history: Sequence[dict[str, Any]]) -> None:
        self.messages = list(history)
        self._origins = ["previous_response_id"] * len(history)

    def instructed(self, instructions: str | None) -> tuple[list[dict[str, Any]], list[str]]:
        """The messages with the instructions before them, in one message with a system's own."""
        if instructions is None:
            return self.messages, self._origins
        content = [_part(instructions)]
        if self.messages and self.messages[0]["role"] == "system":
            first = {"role": "system", "content": content + self.messages[0]["content"]}
            return [first, *self.messages[1:]], self._origins
        first = {"role": "system", "content": content}
        return [first, *self.messages], ["instructions", *self._origins]

    def add(self, origin: str, item: Item) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._answer(origin)["content"] = "".join(item.content)
            case MessageItem():
                self._turn(origin, item)
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._open(origin).setdefault("tool_calls", []).append(call)
            case ResultItem():
                content = [_part(text) for text in item.output]
                result = {"role": "tool", "tool_call_id": item.call_id, "content": content}
                self._append(origin, result)
            case ReasoningItem():
                texts = [part.text for part in item.content]
                self._append(origin, {"role": "assistant", "reasoning": "".join(texts)})

    def _turn(self, origin: str, item: MessageItem) -> None:
        """A user's turn, or one more instruction: those at the beginning are one message."""
        content = [_part(text) for text in item.content]
        if item.role == "user":
            self._append(origin, {"role": "user", "content": content})
        elif not self.messages:
            self._append(origin, {"role": "system", "content": content})
        elif self._origins == ["input.0"] and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += content
        else:
            self._append(origin, {"role": item.role, "content": content})

    def _answer(self, origin: str) -> dict[str, Any]:
        """The message that a text belongs to: that of its thoughts, else a new one."""
        last = self._last_answer()
        if last is None or "content" in last:
            return self._append(origin, {"role": "assistant"})
        return last

    def _open(self, origin: str) -> dict[str, Any]:
        """The message that a call belongs to: that of its thoughts, text and other calls."""
        return self._last_answer() or self._append(origin, {"role": "assistant"})

    def _last_answer(self) -> dict[str, Any] | None:
        """The newest message, if it is the assistant's and stands in the body itself."""
        if not self.messages or not self._origins[-1].startswith("input."):
            return None
        return self.messages[-1] if self.messages[-1]["role"] == "assistant" else None

    def _append(self, origin: str, message: dict[str, Any]) -> dict[str, Any]:
        self.messages.append(message)
        self._origins.append(origin)
        return message


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def answer_turn(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """An answer as the message that the next turn of its conversation reads."""
    turn: dict[str, Any] = {"role": "assistant"}
    calls = [
        {"id": b.call_id, "type": "function", "function": {"name": b.name, "arguments": b.text}}
        for b in blocks
        if b.kind == "call" and b.arguments() is not None
    ]
    for kind, field in (("reasoning", "reasoning"), ("text", "content")):
        text = "".join(block.text for block in blocks if block.kind == kind)
        if text:
            turn[field] = text
    if calls:
        turn["tool_calls"] = calls
    return [turn] if len(turn) > 1 else []


def _options(request: ResponsesRequest) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tools": [_tool(tool) for tool in request.tools],
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
    }
    if request.wants_logprobs:
        options |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    elif request.top_logprobs:
        raise invalid_value(
            "top_logprobs", "top_logprobs needs 'message.output_text.logprobs' in include"
        )
    if request.text is not None and request.text.format is not None:
        options["response_format"] = _response_format(request.text.format)
    return {name: value for name, value in options.items() if value is not None}


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    """This API has name and schema beside the type, chat has them one level below."""
    rest = {name: entry for name, entry in value.items() if name != "type"}
    return {"type": value.get("type")} | ({"json_schema": rest} if rest else {})
