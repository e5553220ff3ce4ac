"""How a family of models reads a chat and writes its answer: one object for both directions.

DeepSeek-V3.2 has its own encoder and call markup; other checkpoints bring a Jinja template. Which
one a checkpoint gets is chosen once, at start, with its reason.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from ..configs.server import ChatFormatChoice, ChatFormatName
from .chat_encoding import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER, start_marker
from .chat_messages import InvalidMessagesError, Message
from .chat_request import encode_request
from .chat_template import ChatTemplate
from .parsers.dsml import DsmlContent
from .parsers.dsml_grammar import CallableTool, calls_grammar
from .parsers.reasoning import OutputParser, PlainContent
from .prompt_runs import Run
from .tokenizer import Tokenizer
from .tokenizer_files import read_settings

StartState = Literal["reasoning", "content"]
V32_TYPES = frozenset({"deepseek_v32"})


class ChatFormat(Protocol):
    """One family's chat format. `default_thinking` is what an absent thinking switch means."""

    name: ChatFormatName
    default_thinking: bool

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        thinking: bool,
        add_generation_prompt: bool = True,
        response_schema: Any = None,
    ) -> list[Run]:
        """The prompt, ending where the model is to write.

        A last message with `prefix` is continued (see `mark_prefill`). Raises InvalidMessagesError
        for a chat that the format cannot carry.
        """
        ...

    def start(self, runs: Sequence[Run]) -> StartState:
        """What the model writes first behind this prompt."""
        ...

    def markup_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that the parser has to see even where special tokens are skipped."""
        ...

    def calls_grammar(
        self, tokenizer: Tokenizer, tools: Sequence[CallableTool], many: bool, forced: bool
    ) -> str:
        """What calls of these tools look like; unless `forced`, text may stand in their place."""
        ...

    def parser(
        self, start: StartState, tools: Sequence[dict[str, Any]] = (), separate: bool = True
    ) -> OutputParser:
        """A fresh parser for one answer; with `separate` false markers of thoughts are content."""
        ...


class DeepseekV32:
    """DeepSeek-V3.2 (not the Exp release, which brings a template)."""

    name: ChatFormatName = "deepseek_v32"
    default_thinking = False
    required = tuple(c.literal for c in (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML))

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        thinking: bool,
        add_generation_prompt: bool = True,
        response_schema: Any = None,
    ) -> list[Run]:
        return encode_request(messages, tools, thinking, add_generation_prompt, response_schema)

    def start(self, runs: Sequence[Run]) -> StartState:
        return start_marker(runs)

    def markup_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        return frozenset(tokenizer.control_ids([DSML.literal]))

    def calls_grammar(
        self, tokenizer: Tokenizer, tools: Sequence[CallableTool], many: bool, forced: bool
    ) -> str:
        return calls_grammar(tools, tokenizer.control_ids([DSML.literal])[0], many, forced)

    def parser(
        self, start: StartState, tools: Sequence[dict[str, Any]] = (), separate: bool = True
    ) -> OutputParser:
        return OutputParser(start, DsmlContent(tools) if tools else PlainContent(), separate)


class JinjaFormat:
    """A checkpoint's own template. Its call markup is not read, so tools are refused."""

    name: ChatFormatName = "jinja"
    default_thinking = False

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        thinking: bool,
        add_generation_prompt: bool = True,
        response_schema: Any = None,
    ) -> list[Run]:
        """As every format; a schema has no place in a template and is left to the grammar."""
        if tools:
            raise InvalidMessagesError(
                "tools", "tools are not supported with this checkpoint's chat template"
            )
        return self._template.render(messages, thinking, add_generation_prompt)

    def start(self, runs: Sequence[Run]) -> StartState:
        return start_marker(runs)

    def markup_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        return frozenset()

    def calls_grammar(
        self, tokenizer: Tokenizer, tools: Sequence[CallableTool], many: bool, forced: bool
    ) -> str:
        raise NotImplementedError("`encode` refuses tools first")

    def parser(
        self, start: StartState, tools: Sequence[dict[str, Any]] = (), separate: bool = True
    ) -> OutputParser:
        return OutputParser(start, PlainContent(), separate, may_open=True)


class FormatChoice(msgspec.Struct, frozen=True):
    """A format, why it was taken, and what looks wrong about it, if anything does."""

    format: ChatFormat
    reason: str
    warning: str | None = None


def choose_format(
    model_type: str,
    directory: str | Path,
    tokenizer: Tokenizer,
    wanted: ChatFormatChoice = "auto",
) -> FormatChoice | None:
    """The chat format of a checkpoint; None where it has none, so that chats are refused.

    A template beats the built-in encoder, since only the releases without one are meant by it.
    Raises ValueError for a wanted format that cannot work, a broken template, or a tokenizer that
    lacks the format's control tokens.
    """
    settings = read_settings(Path(directory))
    has_template = bool(settings.chat_templates)
    is_v32 = model_type in V32_TYPES
    asked = "" if wanted == "auto" else "asked for"
    if wanted == "deepseek_v32" or (wanted == "auto" and is_v32 and not has_template):
        tokenizer.control_ids(DeepseekV32.required)
        reason = asked or f"{model_type} without a chat template"
        warning = None
        if has_template:
            warning = "the checkpoint brings a chat template of its own"
        elif not is_v32:
            warning = f"{model_type} was not trained on this format"
        return FormatChoice(DeepseekV32(), reason, warning)
    if has_template:
        template = ChatTemplate(settings.chat_templates, tokenizer.control, settings)
        reason = asked or "the checkpoint brings a chat template"
        return FormatChoice(JinjaFormat(template), reason)
    if wanted == "jinja":
        raise ValueError("the checkpoint has no chat template")
    return None
