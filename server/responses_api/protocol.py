"""The body of POST /v1/responses.

Ranges that chat has as well are checked by chat's own types after the translation.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from ..errors import shown
from ..protocol import NonNegative, NumLogprobs
from ..validation import NEUTRAL, RequestModel, Strict, refuse, wrong

_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_TEXT_TYPES = ("input_text", "output_text", "text", "refusal")
_Status = Literal["in_progress", "completed", "incomplete"]


def _texts(value: Any) -> list[str]:
    """Content as its texts, whatever side wrote them; other parts are refused by their type."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    return [_text_of(part, index) for index, part in enumerate(value)]


def _text_of(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong(f"part {index} must be an object with a type")
    if kind not in _TEXT_TYPES:
        raise refuse(f"part {index} has type {shown(kind)}; only text parts are supported")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise wrong(f"part {index} must hold its text as a string")
    return text


_PARTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
Texts = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_PARTS)]


class MessageItem(Strict):
    """A turn of the system, the user or the assistant."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    id: str | None = None
    status: _Status | None = None
    phase: str | None = None


class CallItem(Strict):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    id: str | None = None
    status: _Status | None = None


class ResultItem(Strict):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    id: str | None = None
    status: _Status | None = None


class ReasoningText(Strict):
    """Thoughts, or a summary of them; this server makes none, so a summary is not read."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """Thoughts of an earlier answer, in the clear; those of another server cannot be read."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: None = None
    status: _Status | None = None


def _kind(value: Any) -> str | None:
    return value.get("type", "message") if isinstance(value, dict) else value.type


def _tag(value: Any) -> str:
    return f"<{_kind(value)}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[ResultItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_tag),
]


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("must be a string or a list of items")
    for index, item in enumerate(value):
        kind = _kind(item) if isinstance(item, dict) else None
        if not isinstance(kind, str):
            raise wrong(f"item {index} must be an object with a type")
        if kind not in _ITEM_TYPES:
            raise refuse(f"item {index} has type {shown(kind)}, which is not supported")
    return value


Items = Annotated[
    list[Item],
    Field(min_length=1),
    BeforeValidator(_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


def _function(value: Any) -> str:
    if value == "function":
        return value
    raise refuse(f"the tool type {shown(value)} is not supported; only 'function' tools are")


class Tool(Strict):
    """A function the model may call."""

    type: Annotated[
        Literal["function"], BeforeValidator(_function), WithJsonSchema({"const": "function"})
    ]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _choice(value: Any) -> Any:
    """The choice as chat writes it; a name stands one level deeper there."""
    if not isinstance(value, dict):
        return value
    if value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "function": {"name": value["name"]}}
    raise refuse(f"the tool choice of type {shown(value.get('type'))} is not supported")


class TextConfig(Strict):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """How much thought goes into the answer; no summary is made, which "auto" allows."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None


class StreamOptions(Strict):
    """No padding is sent, so there is none to leave out."""

    include_obfuscation: bool = False


class ResponsesRequest(RequestModel):
    """Body of POST /v1/responses."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "background": (False,),
            "service_tier": NEUTRAL["service_tier"],
            "truncation": ("disabled",),
        }
    )

    model: str = ""
    input: Items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: NonNegative | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Annotated[Any, BeforeValidator(_choice)] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = Field(
        default_factory=list
    )
    top_logprobs: NumLogprobs = 0
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include
