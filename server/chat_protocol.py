"""The body of POST /v1/chat/completions, down to messages and tools."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from .chat_messages import Message, ToolCall
from .errors import invalid_value, shown
from .protocol import MAX_LOGPROBS, GenerationRequest
from .structured_fields import AnswerFormat
from .validation import NEUTRAL, Strict, refuse, wrong

MAX_TOOLS = 128
_THINKING_KEYS = frozenset({"thinking", "enable_thinking"})


def _join_parts(value: Any) -> str:
    """Text content as one string; parts are joined as DeepSeek joins them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    return "\n\n".join(_text_of(part, index) for index, part in enumerate(value))


def _text_of(part: Any, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong(f"part {index} must be an object with a type")
    if part["type"] not in ("text", "refusal"):
        raise refuse(f"part {index} has type {shown(part['type'])}; only text parts are supported")
    text = part.get("text") if part["type"] == "text" else part.get("refusal")
    unknown = part.keys() - {"type", part["type"], "cache_control"}
    if not isinstance(text, str):
        raise wrong(f"part {index} must hold its text as a string")
    if unknown:
        raise refuse(f"part {index} has the unknown field {shown(min(unknown))}")
    return text


def _no_items(value: Any) -> None:
    if value != []:
        raise refuse("is not supported by this server")


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str | None,
    BeforeValidator(_join_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]
OnlyEmpty = Annotated[None, BeforeValidator(_no_items)]


class CalledFunction(Strict):
    """Name and JSON arguments of a call in the history."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = ""


class CallItem(Strict):
    """A call the assistant made earlier; `index` is left from streamed deltas."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    """One message as clients send it, or send back what they received."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallItem] = Field(default_factory=list)
    tool_call_id: str | None = None
    prefix: bool = False
    name: str | None = None
    refusal: str | None = None
    annotations: OnlyEmpty = None

    def convert(self, index: int) -> Message:
        """The message for the encoders; raises ApiError where fields and role disagree."""
        path = f"messages.{index}"
        assistant = self.role == "assistant"
        given = {
            "reasoning_content": self.reasoning_content is not None,
            "reasoning": self.reasoning is not None,
            "tool_calls": bool(self.tool_calls),
            "prefix": self.prefix,
            "refusal": self.refusal is not None,
        }
        for name, is_given in given.items():
            if is_given and not assistant:
                raise invalid_value(f"{path}.{name}", f"{path}.{name} belongs to the assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            rule = "is required for" if self.role == "tool" else "goes only with"
            message = f"{path}.tool_call_id {rule} the role 'tool'"
            raise invalid_value(f"{path}.tool_call_id", message)
        reasoning = self._reasoning(path)
        empty = self.content is None and self.refusal is None
        if empty and not (assistant and (self.tool_calls or reasoning is not None)):
            raise invalid_value(f"{path}.content", f"{path}.content must not be null or missing")
        return Message(
            role=self.role,
            content=self.refusal if self.content is None else self.content,
            reasoning=reasoning,
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
            ),
            tool_call_id=self.tool_call_id,
            prefix=self.prefix,
        )

    def _reasoning(self, path: str) -> str | None:
        both = {text for text in (self.reasoning, self.reasoning_content) if text is not None}
        if len(both) > 1:
            raise invalid_value(
                f"{path}.reasoning", f"{path}: reasoning and reasoning_content differ"
            )
        return both.pop() if both else None


class FunctionDefinition(Strict):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(Strict):
    """The function that must be called."""

    name: str


class NamedTool(Strict):
    """A tool choice that names its function."""

    type: Literal["function"] = "function"
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict) or value in ("auto", "none", "required"):
        return value
    raise wrong("must be 'auto', 'none', 'required' or an object that names a function")


class ThinkingObject(Strict):
    """The switch as DeepSeek's and Anthropic's clients write it."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Annotated[int | None, Field(ge=1, lt=2**63)] = None


def _thinking(value: Any) -> Any:
    """A plain bool as the object that says the same."""
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    if isinstance(value, dict):
        return value
    raise wrong("must be a bool, or an object whose type is 'enabled' or 'disabled'")


def template_switch(kwargs: Mapping[str, Any]) -> bool | None:
    """The thinking switch among the arguments of a chat template; nothing else may be there."""
    given = {key: value for key, value in kwargs.items() if value is not None}
    for key, value in given.items():
        if key not in _THINKING_KEYS:
            raise refuse(f"the argument {shown(key)} is not supported by this server")
        if not isinstance(value, bool):
            raise wrong(f"{key} must be a bool")
    return given.get("thinking", given.get("enable_thinking"))


def _template_kwargs(value: Any) -> bool | None:
    if not isinstance(value, dict):
        raise wrong("must be an object")
    return template_switch(value)


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<function>")],
    Discriminator(lambda value: "<word>" if isinstance(value, str) else "<function>"),
    BeforeValidator(_tool_choice),
]
TemplateSwitch = Annotated[
    bool | None,
    BeforeValidator(_template_kwargs),
    WithJsonSchema(
        {"type": "object", "properties": {key: {"type": "boolean"} for key in _THINKING_KEYS}}
    ),
]
ThinkingSwitch = Annotated[
    ThinkingObject,
    BeforeValidator(_thinking),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, ThinkingObject.model_json_schema()]},
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatPromptFields(Strict):
    """What decides the prompt of a chat, shared with /tokenize."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    response_format: AnswerFormat = None
    chat_template_kwargs: TemplateSwitch = None
    thinking: ThinkingSwitch | None = None
    reasoning_effort: Effort | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def wants_thinking(self, default: bool) -> bool:
        """The first spelling that is given decides."""
        thinking = None if self.thinking is None else self.thinking.type == "enabled"
        for switch in (self.chat_template_kwargs, thinking):
            if switch is not None:
                return switch
        return default if self.reasoning_effort is None else self.reasoning_effort != "none"


class ChatRequest(ChatPromptFields, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            **NEUTRAL,
            "echo": (False,),
            "suffix": ("",),
            "functions": ([],),
            "function_call": ("none",),
            "add_special_tokens": (False,),
            "modalities": (["text"],),
            "verbosity": ("medium",),
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    thinking_token_budget: Annotated[int | None, Field(ge=1, lt=2**63)] = None

    @property
    def thinking_budget(self) -> int | None:
        """Tokens that thoughts may have, by the first spelling that is given."""
        if self.thinking_token_budget is not None or self.thinking is None:
            return self.thinking_token_budget
        return self.thinking.budget_tokens
