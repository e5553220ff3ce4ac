"""Renders a checkpoint's own Jinja template into runs, so that no text of a user becomes control.

A template mixes control literals with text of the request in one string. Before rendering, each
character of the request that begins or ends a control literal is swapped for one that occurs
nowhere in the request or the template; afterwards a literal in the string can only be the
template's, and the characters are swapped back. Swapping single characters keeps lengths and white
space, so that templates may trim and compare. (A template that puts both delimiters around a user's
word is the one way left; it would have made that token on purpose.)
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.sandbox

from .chat_messages import InvalidMessagesError, Message
from .chat_request import check_turns, sort_results
from .prompt_runs import Control, Run, join_runs
from .tokenizer_files import TokenizerSettings

# Private-use code points: no other text has a reason to hold them, and there are 131,068.
_SPARE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
_MAX_CHARACTERS = 64_000_000
# What a template may raise over values it did not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The template of one checkpoint, compiled; of several named ones, "default".

    Raises ValueError for a template that does not compile.
    """

    def __init__(
        self, sources: Mapping[str, str], control: Mapping[str, int], settings: TokenizerSettings
    ) -> None:
        if "default" not in sources:
            raise ValueError("the checkpoint has no chat template named default")
        self._source = sources["default"]
        try:
            self._template = _environment().from_string(self._source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        literals = sorted(filter(_is_bracketed, control), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        self._edges = sorted({edge for name in literals for edge in (name[0], name[-1])})
        self._tokens = {
            "bos_token": settings.bos_token or "",
            "eos_token": settings.eos_token or "",
        }

    def render(
        self, messages: Sequence[Message], thinking: bool, add_generation_prompt: bool
    ) -> list[Run]:
        """The prompt of a chat; a last message marked `prefix` is left open.

        Developer messages count as system messages, which is what templates know. Raises
        InvalidMessagesError where the template refuses the chat.
        """
        check_turns(messages)
        ordered = sort_results(messages)
        turns = [_as_dict(message) for message in ordered]
        there, back = self._swaps(turns)
        variables = {
            "messages": _swapped(turns, there),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not ordered[-1].prefix,
            "thinking": thinking,
            "enable_thinking": thinking,
            **self._tokens,
        }
        text = self._rendered(variables)
        if ordered[-1].prefix:
            text = _left_open(text, (ordered[-1].content or "").translate(there))
        return join_runs(self._runs(text, back))

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = _MAX_CHARACTERS
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    break
        except _TEMPLATE_ERRORS as error:
            message = f"the chat template refuses this chat: {error}"
            raise InvalidMessagesError("messages", message) from error
        if room < 0:
            raise InvalidMessagesError("messages", "the rendered chat is too long")
        return "".join(pieces)

    def _swaps(self, request: Any) -> tuple[dict[int, int], dict[int, int]]:
        used = set(self._source).union(*_texts(request))
        spare = (point for point in _SPARE if chr(point) not in used)
        there = dict(zip(map(ord, self._edges), spare, strict=False))
        if len(there) < len(self._edges):
            raise InvalidMessagesError("messages", "the chat uses every private-use character")
        return there, {spare_point: point for point, spare_point in there.items()}

    def _runs(self, text: str, back: Mapping[int, int]) -> Iterator[Run]:
        end = 0
        for match in self._literal.finditer(text):
            yield text[end : match.start()].translate(back)
            yield Control(match.group())
            end = match.end()
        yield text[end:].translate(back)


class _Arguments(str):
    """A call's arguments: JSON text to templates that print it, an object to those that walk it."""

    parsed: dict[str, Any]

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parsed.items())


def _arguments(text: str, parsed: dict[str, Any]) -> _Arguments:
    arguments = _Arguments(text)
    arguments.parsed = parsed
    return arguments


def _is_bracketed(literal: str) -> bool:
    """Only such added tokens count: of others, the edges are letters of anybody's text."""
    return all(not edge.isalnum() and not edge.isspace() for edge in (literal[:1], literal[-1:]))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As transformers renders templates: same white space rules, filters and functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, _Arguments):
        value = value.parsed
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _as_dict(message: Message) -> dict[str, Any]:
    """The message as OpenAI's API writes it, which is what templates read."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments(call.arguments or "{}", _object(call.arguments)),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _object(text: str) -> dict[str, Any]:
    return json.loads(text) if text else {}


def _swapped(value: Any, there: Mapping[int, int]) -> Any:
    match value:
        case _Arguments():
            return _arguments(value.translate(there), _swapped(value.parsed, there))
        case str():
            return value.translate(there)
        case list():
            return [_swapped(item, there) for item in value]
        case dict():
            return {_swapped(key, there): _swapped(item, there) for key, item in value.items()}
    return value


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for key, item in value.items():
                yield from _texts(key)
                yield from _texts(item)


def _left_open(text: str, content: str) -> str:
    """The rendering up to the end of its last message's content."""
    wanted = content.strip()
    if not wanted:
        raise InvalidMessagesError("messages", "the final message needs content to be continued")
    place = text.rfind(wanted)
    if place < 0:
        raise InvalidMessagesError("messages", "the chat template does not show the final message")
    end = place + len(wanted)
    spaces = content[len(content.rstrip()) :]
    return text[:end] + (spaces if text.startswith(spaces, end) else "")
