"""The grammar of tool calls in DeepSeek-V3.2's markup: what `dsml.py` reads, as rules to write by.

A call's parameters come in the order of the tool's schema, the optional ones may be missing. Text
goes out raw where the schema asks for no more than text; any other value is JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..json_schema import SchemaRefused, escape, read_schema
from ..lark import ANY_TEXT, escaped, json_text, literal, regex, text_without, token

MARK = "｜DSML｜"
_RAW_KEYS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_NEWLINE = "\n"
_CLOSING = "parameter>"
_NAME = r"[A-Za-z0-9_.\-]{1,64}"
_LAYOUT: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True)
class CallableTool:
    """A function the model may call; `parameters` is None where any arguments will do.

    path: where its parameters stand in the request, for refusals.
    """

    name: str
    parameters: Mapping[str, Any] | None
    path: str


def calls_grammar(tools: Sequence[CallableTool], mark_id: int, many: bool, forced: bool) -> str:
    """A block of calls; unless `forced`, text in front of it or instead of it.

    mark_id: the token of MARK. many: whether the block may hold more than one call.
    Raises SchemaRefused, whose pointer begins with the tool's path.
    """
    return _Writer(mark_id).write(tools, many, forced)


@dataclass
class _Writer:
    """Collects rules, a line each.

    The library's lexer takes the longest piece it can and never turns back, so all text between two
    marks is one piece: a rule begins behind a mark and ends with one.
    """

    mark_id: int
    _rules: list[str] = field(default_factory=list)

    def write(self, tools: Sequence[CallableTool], many: bool, forced: bool) -> str:
        mark = token(self.mark_id)
        block = f'{mark} "function_calls>\\n<" {mark} invoke'
        again = f' | "invoke>\\n<" {mark} invoke' if many else ""
        self._rules += [
            f'start: "\\n\\n<" {block}' if forced else f"start: CONTENT | LEAD {block}",
            f'end: "invoke>\\n</" {mark} "function_calls>"{again}',
            f"CONTENT: {text_without(MARK)}",
            f"LEAD: {regex(ANY_TEXT + '<')} & ~{regex(ANY_TEXT + escaped(MARK) + ANY_TEXT)}",
        ]
        names = [self._tool(f"f{number}", tool) for number, tool in enumerate(tools)]
        return "\n".join([*self._rules, f"invoke: {' | '.join(names)}"])

    def _tool(self, rule: str, tool: CallableTool) -> str:
        schema = None if tool.parameters is None else _parameters(tool)
        opening = f'invoke name="{tool.name}">'
        if schema is None:
            self._any_parameters(rule, opening)
            return rule
        self._chain(rule, opening, self._listed(rule, schema, tool.path))
        return f"{rule}_first0"

    def _any_parameters(self, rule: str, opening: str) -> None:
        forms = [(True, self._text()), (False, _json({}))]
        self._rules.append(f"{rule}_one: {self._parameter(regex(_NAME), forms)}")
        for name, text in ((rule, opening), (f"{rule}_next", _CLOSING)):
            self._rules.append(
                f"{name}: {self._next(text)} {rule}_one {rule}_next | {self._last(text)}"
            )

    def _listed(self, rule: str, schema: Mapping[str, Any], path: str) -> list[tuple[str, bool]]:
        """The rule of each parameter, and whether it must be written."""
        properties: dict[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        if required - properties.keys():
            raise SchemaRefused(f"{path}/required", "names a parameter that is not listed")
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for number, (name, part) in enumerate(properties.items()):
            place = f"{path}/properties/{escape(name)}"
            forms = list(self._forms(part, definitions, place))
            one = f"{rule}_p{number}"
            self._rules.append(f"{one}: {self._parameter(_name(name, place), forms)}")
            parts.append((one, name in required))
        return parts

    def _chain(self, rule: str, opening: str, parts: Sequence[tuple[str, bool]]) -> None:
        """`first` rules stand behind no parameter yet, `next` rules behind one."""
        for kind, text in (("first", opening), ("next", _CLOSING)):
            for number, (one, is_required) in enumerate(parts):
                skip = "" if is_required else f" | {rule}_{kind}{number + 1}"
                self._rules.append(
                    f"{rule}_{kind}{number}: {self._next(text)} {one} {rule}_next{number + 1}{skip}"
                )
            self._rules.append(f"{rule}_{kind}{len(parts)}: {self._last(text)}")

    def _next(self, text: str) -> str:
        """Behind `text` a parameter follows."""
        return f"{literal(text + _NEWLINE + '<')} {token(self.mark_id)}"

    def _last(self, text: str) -> str:
        """Behind `text` the call ends; without parameters it holds an empty line."""
        empty = "" if text == _CLOSING else _NEWLINE
        return f"{literal(text + empty + _NEWLINE + '</')} {token(self.mark_id)} end"

    def _parameter(self, name: str, forms: Sequence[tuple[bool, str]]) -> str:
        """From behind the opening mark up to and with the closing one."""
        values = " | ".join(
            f'"\\" string=\\"{str(is_text).lower()}\\">" {value}' for is_text, value in forms
        )
        return f'"parameter name=\\"" {name} ({values}) {token(self.mark_id)}'

    def _forms(
        self, part: Any, definitions: dict[str, Any], place: str
    ) -> Iterator[tuple[bool, str]]:
        """The ways to write a value: (whether it is raw text, its rule up to the closing mark)."""
        for single in _alternatives(part, definitions):
            raw = self._raw(single) if isinstance(single, dict) else None
            if raw is not None:
                yield True, raw
            elif single is False:
                raise SchemaRefused(place, "admits no value")
            elif single is True:
                yield True, self._text()
                yield False, _json({})
            else:
                yield False, _json(single | definitions)

    def _raw(self, schema: Mapping[str, Any]) -> str | None:
        """A text that needs no quotes; None where the schema says more than a pattern of it can."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not schema.keys() <= _RAW_KEYS or not (schema.get("type") == "string" or values):
            return None
        if values is None:
            return self._text(schema.get("minLength", 0), schema.get("maxLength"))
        if schema.keys() & {"minLength", "maxLength"} or len(schema.keys() & {"enum", "const"}) > 1:
            return None
        if not all(isinstance(value, str) and value and MARK not in value for value in values):
            return None
        return regex(f"(?:{'|'.join(map(escaped, values))})<\\/")

    def _text(self, shortest: int = 0, longest: int | None = None) -> str:
        """A terminal of text that cannot be taken for markup, with what opens the closing tag."""
        most = "" if longest is None else longest
        name = f"TEXT_{shortest}_{most}"
        body = regex(f"(?s:.{{{shortest},{most}}})<\\/")
        rule = f"{name}: {body} & ~{regex(ANY_TEXT + escaped(MARK) + ANY_TEXT)}"
        if rule not in self._rules:
            self._rules.append(rule)
        return name


def _json(schema: dict[str, Any]) -> str:
    return json_text(schema, **_LAYOUT) + ' "</"'


def _name(name: str, place: str) -> str:
    if not name or not name.isprintable() or '"' in name or MARK in name:
        raise SchemaRefused(place, "the call markup cannot carry a parameter of this name")
    return literal(name)


def _parameters(tool: CallableTool) -> dict[str, Any] | None:
    """A tool's schema; None where it describes an object without saying anything about it."""
    try:
        schema = read_schema(dict(tool.parameters or {}))
    except SchemaRefused as error:
        raise SchemaRefused(tool.path + error.pointer, str(error)) from None
    if schema.get("additionalProperties") in (True, {}) and not schema.get("properties"):
        del schema["additionalProperties"]
    if schema in ({}, {"type": "object"}):
        return None
    unusable = schema.keys() - {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
    }
    if unusable or schema.get("type", "object") != "object":
        place = f"{tool.path}/{escape(min(unusable, default='type'))}"
        raise SchemaRefused(place, "parameters must be an object that lists its properties")
    _check_references(schema, tool.path)
    return schema


def _check_references(schema: Mapping[str, Any], path: str) -> None:
    """Every value is a document of its own in the markup, with the definitions beside it."""
    left: list[tuple[Any, str]] = [(schema, path)]
    while left:
        value, place = left.pop()
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
                raise SchemaRefused(f"{place}/$ref", "must point into $defs or definitions")
            left += [(part, f"{place}/{escape(key)}") for key, part in value.items()]
        elif isinstance(value, list):
            left += [(part, f"{place}/{index}") for index, part in enumerate(value)]


def _alternatives(part: Any, definitions: dict[str, Any], depth: int = 0) -> Iterator[Any]:
    """A schema as schemas of which one must hold: the raw forms are seen then."""
    if not isinstance(part, dict) or depth > 8:
        yield part
        return
    types = part.get("type")
    if part.keys() == {"anyOf"}:
        for option in part["anyOf"]:
            yield from _alternatives(option, definitions, depth + 1)
    elif part.keys() == {"$ref"} and (target := _lookup(part["$ref"], definitions)) is not None:
        is_small = isinstance(target, dict) and target.get("type") == "string"
        yield target if is_small else part
    elif isinstance(types, list) and len(types) > 1 and not part.keys() & {"enum", "const"}:
        for name in types:
            yield part | {"type": name}
    elif part == {}:
        yield True
    else:
        yield part


def _lookup(reference: str, definitions: dict[str, Any]) -> Any:
    kind, _, name = reference.removeprefix("#/").partition("/")
    return definitions.get(kind, {}).get(name.replace("~1", "/").replace("~0", "~"))
