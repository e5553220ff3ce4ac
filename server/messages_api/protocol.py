"""The bodies of POST /v1/messages and /v1/messages/count_tokens.

Ranges that chat has as well are checked by chat's own types after the translation, so only what is
particular to this API stands here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from ..errors import shown
from ..validation import RequestModel, Strict, refuse, wrong

_BLOCK_TYPES = ("text", "thinking", "tool_use", "tool_result")


class _Block(Strict):
    """What every block may carry; caching here needs no marks, so they change nothing."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    """A piece of text. Citations belong to features that are not served."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)


class ThinkingBlock(Strict):
    """Thoughts of an earlier answer; this server signs nothing, so any signature passes."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any] = Field(default_factory=dict)


class ToolResultBlock(_Block):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: "Blocks" = Field(default_factory=list)
    is_error: bool = False


def _tag(value: Any) -> str:
    return f"<{value.get('type') if isinstance(value, dict) else value.type}>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_tag),
]


def _blocks(value: Any) -> Any:
    """A plain text as its one block; names the types that cannot be served."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong("must be a string or a list of blocks")
    for index, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise wrong(f"block {index} must be an object with a type")
        if kind not in _BLOCK_TYPES:
            raise refuse(f"block {index} has type {shown(kind)}, which is not supported")
    return value


def _texts(value: Any) -> Any:
    blocks = _blocks(value)
    for index, block in enumerate(blocks):
        if block["type"] != "text":
            raise refuse(f"block {index} has type {shown(block['type'])}; only text is supported")
    return blocks


_BLOCK_LIST = MappingProxyType({"type": "array", "items": {"type": "object"}})
_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, dict(_BLOCK_LIST)]}
Blocks = Annotated[list[Block], BeforeValidator(_blocks), WithJsonSchema(_TEXT_OR_BLOCKS)]
Texts = Annotated[list[TextBlock], BeforeValidator(_texts), WithJsonSchema(_TEXT_OR_BLOCKS)]


class InputMessage(Strict):
    """One turn of the conversation; calls and thoughts are the assistant's, results the user's."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _belongs(self) -> "InputMessage":
        foreign = {
            "assistant": (ToolResultBlock,),
            "user": (ThinkingBlock, ToolUseBlock),
            "system": (ThinkingBlock, ToolUseBlock, ToolResultBlock),
        }[self.role]
        for index, block in enumerate(self.content):
            if isinstance(block, foreign):
                raise wrong(f"block {index} of type '{block.type}' is not the {self.role}'s")
        return self


def _custom(value: Any) -> str:
    if value == "custom":
        return value
    raise refuse(f"the tool type {shown(value)} is not supported; only 'custom' tools are")


class Tool(Strict):
    """A function the model may call; its input is always streamed as it is written."""

    type: Annotated[
        Literal["custom"], BeforeValidator(_custom), WithJsonSchema({"const": "custom"})
    ] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(Strict):
    """Whether and which tool is to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """The thinking switch; "adaptive" lets the model think as long as it wants."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1)] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Strict):
    """The form of the answer, and how much thought goes into it."""

    format: dict[str, Any] | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(RequestModel):
    """Body of POST /v1/messages/count_tokens."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "service_tier": ("auto", "standard_only"),
            "mcp_servers": ([],),
            "inference_geo": ("global",),
        }
    )

    model: str = ""
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Texts = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**63)]
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
