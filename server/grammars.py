"""From the fields of a request to the grammar that its answer must match.

Thoughts stay free up to the end-of-thinking token; from there on the grammar holds. Calls that are
required, or whose tools are strict, are a part of it. A grammar is tried before its request is
queued, so what cannot be served is a 400 that names the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance import regex_to_lark

from . import lark
from .chat_encoding import END_THINK
from .chat_protocol import ChatRequest, NamedTool
from .errors import ApiError, invalid_schema, invalid_value
from .grammar_trials import GrammarRefused
from .json_schema import SchemaRefused, read_schema
from .parsers.dsml_grammar import CallableTool
from .protocol import GenerationRequest
from .service import Service

MAX_GRAMMAR = 1 << 18
"""Characters of a grammar, the whole of it."""
# Between the tokens of JSON: nothing, a space, or a new line with its indentation. Unbounded white
# space would be legal JSON, and a model may never leave it.
SPACE = r"[ ]|\n[ ]{0,24}"


@dataclass(frozen=True)
class _Wish:
    """What a field asks of the answer."""

    param: str
    kind: str
    value: Any


async def answer_grammar(service: Service, request: GenerationRequest) -> str | None:
    """The grammar of a completion; None where nothing is asked. Raises ApiError."""
    wish = _only(_wishes(request))
    if wish is None:
        return None
    part = await _part(service, wish)
    return await _tried(service, wish.param, lark.grammars("start: @answer", answer=part))


async def chat_grammar(
    service: Service, request: ChatRequest, tools: Sequence[dict[str, Any]], thinking: bool
) -> str | None:
    """The grammar of a chat's answer; None where nothing is asked. Raises ApiError.

    tools: those the model was told of. thinking: the prompt ends inside the thoughts.
    """
    wish = _only(_wishes(request))
    forced = request.tool_choice not in ("auto", "none")
    strict = any(tool.function.strict for tool in request.tools) and bool(tools)
    parts: dict[str, str] = {}
    param = "tools"
    if wish is not None and not forced:
        parts["answer"] = await _part(service, wish)
        param = wish.param
    if forced or strict or (tools and parts):
        # Beside an answer that has a form, calls are its alternative; alone, text may stand first.
        parts["calls"] = _calls(service, request, forced or bool(parts))
    if not parts:
        return None
    body = " | ".join(f"@{name}" for name in parts)
    return await _tried(service, param, lark.grammars(_start(service, body, thinking), **parts))


def _start(service: Service, body: str, thinking: bool) -> str:
    if not thinking:
        return f"start: {body}"
    end = service.tokenizer.control_ids([END_THINK.literal])[0]
    thoughts = lark.text_without(END_THINK.literal)
    return f"start: THOUGHTS {lark.token(end)} ({body})\nTHOUGHTS: {thoughts}"


def _wishes(request: GenerationRequest) -> list[_Wish]:
    found: list[_Wish] = []
    given = request.response_format
    if given is not None and given.json_schema is not None:
        path = "response_format.json_schema.schema"
        found.append(_Wish(path, "json", given.json_schema.schema_))
    elif given is not None and given.type == "json_object":
        found.append(_Wish("response_format", "json", {"type": "object"}))
    structured = request.structured_outputs
    if structured is not None:
        before = len(found)
        for kind, value in (
            ("json", structured.json_),
            ("json", {"type": "object"} if structured.json_object else None),
            ("regex", structured.regex),
            ("choice", structured.choice),
            ("grammar", structured.grammar),
        ):
            if value is not None:
                found.append(_Wish(f"structured_outputs.{kind}", kind, value))
        if len(found) == before:
            raise invalid_value("structured_outputs", "structured_outputs asks for nothing")
    if request.regex is not None:
        found.append(_Wish("regex", "regex", request.regex))
    if request.ebnf is not None:
        found.append(_Wish("ebnf", "grammar", request.ebnf))
    return found


def _only(wishes: Sequence[_Wish]) -> _Wish | None:
    if len(wishes) > 1:
        first, second = wishes[0].param, wishes[1].param
        raise invalid_value(second, f"{first} and {second} do not go together")
    return wishes[0] if wishes else None


async def _part(service: Service, wish: _Wish) -> str:
    """The grammar of one wish alone."""
    if wish.kind == "json":
        return f"start: {_json(wish)}"
    if wish.kind == "regex":
        return f"start: {lark.regex(_pattern(wish))}"
    if wish.kind == "choice":
        return f"start: {lark.regex('|'.join(map(lark.escaped, wish.value)))}"
    _check_size(wish.param, wish.value)
    try:
        return await service.trials.translate(wish.value)
    except GrammarRefused as error:
        raise invalid_schema(wish.param, f"{wish.param}: not a usable grammar: {error}") from None


def _json(wish: _Wish) -> str:
    value = wish.value
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid_schema(wish.param, f"{wish.param} is not JSON text") from None
    try:
        return lark.json_text(read_schema(value), whitespace_pattern=SPACE)
    except SchemaRefused as error:
        raise refused_schema(wish.param, error) from None


def refused_schema(param: str, error: SchemaRefused) -> ApiError:
    """A schema's fault as an answer; its pointer goes on from the schema's own place."""
    where = f" at {error.pointer}" if error.pointer else ""
    path = param + error.pointer[:256].replace("/", ".")
    return invalid_schema(path, f"{param}: the schema cannot be served{where[:256]}: {error}")


def _pattern(wish: _Wish) -> str:
    try:
        return regex_to_lark(wish.value)
    except ValueError as error:
        reason = str(error).splitlines()[0][:200]
        raise invalid_schema(wish.param, f"{wish.param}: {reason}") from None


def _calls(service: Service, request: ChatRequest, alone: bool) -> str:
    chat_format = service.chat_format
    choice = request.tool_choice
    if chat_format is None:
        raise invalid_value("tools", "the checkpoint has no chat format")
    tools = []
    for index, tool in enumerate(request.tools):
        function = tool.function
        if isinstance(choice, NamedTool) and function.name != choice.function.name:
            continue
        # Asked for, a call has to fit; where the model is free to call, only strict tools bind it.
        binds = function.strict or (function.strict is None and choice != "auto")
        parameters = function.parameters if binds else None
        path = f"/{index}/function/parameters"
        tools.append(CallableTool(function.name, parameters, path))
    many = request.parallel_tool_calls and not isinstance(choice, NamedTool)
    try:
        return chat_format.calls_grammar(service.tokenizer, tools, many, alone)
    except SchemaRefused as error:
        raise refused_schema("tools", error) from None


def _check_size(param: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR:
        raise invalid_schema(param, f"{param}: more than {MAX_GRAMMAR} characters of grammar")


async def _tried(service: Service, param: str, grammar: str) -> str:
    _check_size(param, grammar)
    try:
        await service.trials.check(grammar)
    except GrammarRefused as error:
        raise invalid_schema(param, f"{param} cannot be served: {error}") from None
    return grammar
