"""What happens to a chat before DeepSeek-V3.2's encoder sees it, and after.

The encoder reproduces the published program; clients send more than that program takes. Here the
first developer message becomes the system message, tools and schema find their place, tool results
are checked and sorted, and a prompt that would not end where the model starts to write gets the
assistant's marker.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from .chat_encoding import ASSISTANT, END_THINK, THINK, encode_messages, parse_arguments
from .chat_messages import InvalidMessagesError, Message
from .prompt_runs import Run

_UNANSWERED = "an assistant message with 'tool_calls' must be followed by tool messages"
_UNASKED = "a message with role 'tool' must be a response to a preceding message with 'tool_calls'"


def encode_request(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    thinking: bool,
    add_generation_prompt: bool = True,
    response_schema: Any = None,
) -> list[Run]:
    """The whole prompt of a request, ending where the model is to write.

    Two user messages in a row stay two turns. An assistant turn without reasoning in thinking mode
    gets empty reasoning. Raises InvalidMessagesError, whose `param` counts the client's messages.
    """
    check_turns(messages)
    ordered = sort_results(messages)
    runs = encode_messages(attach(ordered, tools, response_schema), thinking)
    ends_open = ordered[-1].prefix or ordered[-1].role in ("user", "developer", "tool")
    if add_generation_prompt and not ends_open:
        runs += [ASSISTANT, THINK if thinking else END_THINK]
    return runs


def mark_prefill(
    messages: Sequence[Message], continue_final: bool, add_generation_prompt: bool | None
) -> list[Message]:
    """Set `prefix` on the last message where any spelling asks for it.

    Raises InvalidMessagesError for a prefill that is not a last, call-free assistant message, or
    one beside an explicit `add_generation_prompt`.
    """
    if not messages:
        raise InvalidMessagesError("messages", "messages must not be empty")
    for index, message in enumerate(messages[:-1]):
        if message.prefix:
            raise InvalidMessagesError(
                f"messages.{index}.prefix", "only the last message can be continued"
            )
    last = messages[-1]
    if not (continue_final or last.prefix):
        return list(messages)
    if last.role != "assistant" or last.tool_calls:
        raise InvalidMessagesError(
            f"messages.{len(messages) - 1}",
            "a message to continue must be the assistant's last one, without tool calls",
        )
    if add_generation_prompt:
        raise InvalidMessagesError(
            "add_generation_prompt", "cannot be true when the final message is continued"
        )
    return [*messages[:-1], msgspec.structs.replace(last, prefix=True)]


def check_turns(messages: Sequence[Message]) -> None:
    """Raise InvalidMessagesError for content or arguments the prompt cannot hold."""
    if not messages:
        raise InvalidMessagesError("messages", "messages must not be empty")
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise InvalidMessagesError(f"messages.{index}.content", "content must not be null")
        if index and message.role == "developer" and not message.content:
            raise InvalidMessagesError(
                f"messages.{index}.content", "a developer message needs content"
            )
        for number, call in enumerate(message.tool_calls):
            path = f"messages.{index}.tool_calls.{number}.function.arguments"
            parse_arguments(call.arguments, path)


def attach(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], response_schema: Any
) -> list[Message]:
    """Put the request's tools and schema on the first message, the system one.

    A developer message at index 0 is the system message: OpenAI's clients mean that. An empty
    system message is put in front where there is none. The request's tools replace those that
    messages carry.
    """
    first = messages[0]
    if first.role == "developer":
        first = msgspec.structs.replace(first, role="system")
    turns = [first, *messages[1:]]
    if not tools and response_schema is None:
        return turns
    if tools:
        turns = [msgspec.structs.replace(turn, tools=()) for turn in turns]
    if first.role != "system":
        turns = [Message(role="system", content=""), *turns]
    changes: dict[str, Any] = {"tools": tuple(tools)} if tools else {}
    if response_schema is not None:
        changes["response_schema"] = response_schema
    return [msgspec.structs.replace(turns[0], **changes), *turns[1:]]


def sort_results(messages: Sequence[Message]) -> list[Message]:
    """The same chat with each turn's tool results in the order of its calls.

    Raises InvalidMessagesError where results and calls do not match one to one.
    """
    ordered: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        if message.role == "tool":
            raise InvalidMessagesError(f"messages.{index}", _UNASKED)
        ordered.append(message)
        index += 1
        if message.tool_calls:
            results = _results_of(messages, index)
            ordered += results
            index += len(results)
    return ordered


def _results_of(messages: Sequence[Message], first: int) -> list[Message]:
    """Results from index `first` on, for the calls of the message before it."""
    call_ids = [call.id for call in messages[first - 1].tool_calls]
    if len(set(call_ids)) < len(call_ids):
        raise InvalidMessagesError(f"messages.{first - 1}.tool_calls", "a call id is used twice")
    wanted = set(call_ids)
    results: dict[str, Message] = {}
    for index in range(first, len(messages)):
        message = messages[index]
        if message.role != "tool":
            break
        path = f"messages.{index}.tool_call_id"
        if message.tool_call_id not in wanted:
            raise InvalidMessagesError(path, f"{_UNASKED}; no call has this id")
        if message.tool_call_id in results:
            raise InvalidMessagesError(path, f"{_UNASKED}; this call was answered already")
        results[message.tool_call_id] = message
    missing = [call_id for call_id in call_ids if call_id not in results]
    if missing:
        shown = ", ".join(missing[:4])[:64]
        raise InvalidMessagesError(
            f"messages.{first - 1}.tool_calls", f"{_UNANSWERED}; no result for {shown}"
        )
    return [results[call_id] for call_id in call_ids]
