"""A chat as the encoders see it: validated messages, whatever protocol they came by.

The HTTP layer turns request bodies into these structs (content parts joined, both spellings of the
reasoning field read); the chat formats turn the structs into a prompt.
"""

from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]


class InvalidMessagesError(ValueError):
    """The chat cannot be encoded: the client's fault, answered with 400.

    `param` is the path of the offending field, as in `messages.3.tool_call_id`.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ToolCall(msgspec.Struct, frozen=True):
    """A call the assistant made. `arguments` is the JSON text of an object, or empty."""

    id: str
    name: str
    arguments: str = ""


class Message(msgspec.Struct, frozen=True):
    """One turn. `content` is None only for an assistant that has calls or reasoning alone.

    `prefix` marks a last assistant message that the model is to continue. `tools` and
    `response_schema` travel on system and developer messages only; a request's own are put there
    by the request layer. Tools are the objects of the OpenAI API, `function` member included.
    """

    role: Role
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    response_schema: Any = None
