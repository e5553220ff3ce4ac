"""From a Messages request to the chat request that says the same.

The chat request is then validated, encoded and run like any other. Its mistakes are told by the
paths of the body that the client sent.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from ..bodies import Body
from ..chat_protocol import ChatRequest
from ..long_text import in_thread_if_long
from ..readdress import Addresses, readdressed
from ..validation import validate
from .protocol import (
    CountRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)

_RENAMED = (
    ("stop", "stop_sequences"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
)

_Request = TypeVar("_Request", bound=CountRequest)


async def to_chat(body: Body[_Request]) -> tuple[Body[ChatRequest], Addresses]:
    """The chat request, and where its fields stand in the body; raises ApiError."""
    return await in_thread_if_long(body.size, _to_chat, body)


def _to_chat(body: Body[_Request]) -> tuple[Body[ChatRequest], Addresses]:
    request = body.fields
    chat = _Chat()
    if request.system:
        chat.add("system", {"role": "system", "content": _parts(request.system)})
    for index, message in enumerate(request.messages):
        chat.add_turn(f"messages.{index}", message)
    chat.mark_prefill()
    document = {"model": request.model, "messages": chat.messages, **_options(request)}
    addresses = chat.addresses(len(request.tools))
    with readdressed(addresses):
        fields = validate(ChatRequest, document)
    return Body(fields, document, body.size), addresses


class _Chat:
    """The messages so far, and where each of them comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._origins: list[str] = []

    def add(self, origin: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._origins.append(origin)

    def add_turn(self, path: str, message: InputMessage) -> None:
        if message.role == "assistant":
            self.add(path, _assistant(message))
            return
        for number, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                self.add(f"{path}.content.{number}", _result(block))
        texts = [block for block in message.content if isinstance(block, TextBlock)]
        if texts or not message.content:
            self.add(path, {"role": message.role, "content": _parts(texts)})

    def mark_prefill(self) -> None:
        """A last message of the assistant is the beginning of the answer."""
        last = self.messages[-1]
        if last["role"] == "assistant" and "tool_calls" not in last:
            last["prefix"] = True

    def addresses(self, num_tools: int) -> Addresses:
        tools = []
        for index in range(num_tools):
            path = f"tools.{index}"
            tools.append((f"{path}.function.parameters", f"{path}.input_schema"))
            tools.append((f"{path}.function", path))
        turns = [(f"messages.{index}", origin) for index, origin in enumerate(self._origins)]
        return [*turns, *tools, *_RENAMED]


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _assistant(message: InputMessage) -> dict[str, Any]:
    blocks = message.content
    turn: dict[str, Any] = {"role": "assistant"}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    # The pieces of one answer, as this server or another cut it: nothing stands between them.
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if texts or not (thoughts or calls):
        turn["content"] = "".join(texts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _result(block: ToolResultBlock) -> dict[str, Any]:
    texts = [part for part in block.content if isinstance(part, TextBlock)]
    content = _parts(texts)
    if block.is_error:
        # The prompt has no other place for it.
        content = [{"type": "text", "text": "Error:"}, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _options(request: CountRequest) -> dict[str, Any]:
    options: dict[str, Any] = {"tools": [_tool(tool) for tool in request.tools]}
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        options["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        options["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if thinking is not None:
        options["thinking"] = thinking.type != "disabled"
        options["thinking_token_budget"] = thinking.budget_tokens
        options["include_reasoning"] = thinking.display != "omitted"
    if output is not None:
        options["reasoning_effort"] = output.effort
        if output.format is not None:
            options["response_format"] = _response_format(output.format)
    if isinstance(request, MessagesRequest):
        options["max_tokens"] = request.max_tokens
        options["stop"] = request.stop_sequences
        options["temperature"] = request.temperature
        options["top_p"] = request.top_p
        options["top_k"] = request.top_k
    return {name: value for name, value in options.items() if value is not None}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    kept = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    """This API has the schema beside the type, chat has it one level below."""
    rest = {name: entry for name, entry in value.items() if name not in ("type", "schema")}
    schema = {"name": "answer", "schema": value.get("schema"), **rest}
    return {"type": value.get("type"), "json_schema": schema}
