"""What of JSON Schema can be served: every keyword is followed, is a mere note, or is refused.

A keyword that the grammar engine does not follow would let answers through that do not fit, so the
schema is read here first and a refusal names the place as a JSON pointer. What comes out is the
schema without its notes. Objects that list properties and do not speak of others are closed: their
answers still fit, and a model is not led to invent keys.
"""

import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .errors import shown

MAX_DEPTH = 32
MAX_NODES = 4096
MAX_COUNT = 1_000_000
MAX_ENUM = 4096
MAX_PATTERN = 1024
MAX_MULTIPLE = 1000
MAX_BOUND = 2**53
"""The grammar engine reads bounds as doubles, which miss whole numbers further out."""

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_ONE = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NOTES = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly"}
    | {"writeOnly", "$schema", "$id", "$comment", "discriminator", "contentMediaType"}
    | {"contentEncoding"}
)
_LOWER = frozenset({"minimum", "exclusiveMinimum"})
_UPPER = frozenset({"maximum", "exclusiveMaximum"})
_COMBINING = frozenset({"anyOf", "oneOf", "allOf", "$ref"})


class SchemaRefused(Exception):
    """A schema that cannot be served; `pointer` is the JSON pointer of the part at fault."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(reason)
        self.pointer = pointer


def read_schema(schema: Any) -> dict[str, Any]:
    """The schema as the grammar engine takes it; raises SchemaRefused."""
    return _Reader(schema).read()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lower(value: Any) -> str | None:
    if not _is_number(value):
        return "must be a number"
    return f"must be at most {MAX_BOUND}" if value > MAX_BOUND else None


def _upper(value: Any) -> str | None:
    if not _is_number(value):
        return "must be a number"
    return f"must be at least {-MAX_BOUND}" if value < -MAX_BOUND else None


def _narrowed(bound: float) -> float:
    """A bound that the engine knows exactly; answers that keep to it keep to the one given."""
    return max(-MAX_BOUND, min(bound, MAX_BOUND))


def _count(value: Any) -> str | None:
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return None
    return f"must be an integer from 0 to {MAX_COUNT}"


def _multiple(value: Any) -> str | None:
    if _is_number(value) and 0 < value <= MAX_MULTIPLE:
        return None
    return f"must be a number above 0 and at most {MAX_MULTIPLE}"


def _type(value: Any) -> str | None:
    listed = value if isinstance(value, list) else [value]
    for entry in listed:
        if not isinstance(entry, str) or entry not in _TYPES:
            return f"{shown(entry)} is not a type of JSON"
    return None if listed else "must name a type"


def _enum(value: Any) -> str | None:
    if isinstance(value, list) and 0 < len(value) <= MAX_ENUM:
        return None
    return f"must be a list of 1 to {MAX_ENUM} values"


def _names(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return None
    return "must be a list of strings"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _pattern(value: Any) -> str | None:
    if isinstance(value, str) and len(value) <= MAX_PATTERN:
        return None
    return f"must be a string of at most {MAX_PATTERN} characters"


_PLAIN: Mapping[str, Callable[[Any], str | None]] = MappingProxyType(
    {
        **dict.fromkeys(_LOWER, _lower),
        **dict.fromkeys(_UPPER, _upper),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _count),
        **dict.fromkeys(("minProperties", "maxProperties"), _count),
        "multipleOf": _multiple,
        "type": _type,
        "enum": _enum,
        "const": lambda value: None,
        "required": _names,
        "pattern": _pattern,
        "format": _text,
        "$ref": _text,
    }
)


class _Reader:
    """One pass over a schema; `_places` and `_references` meet at the end."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._places: set[str] = set()
        self._references: dict[str, str] = {}
        self._may_close = True

    def read(self) -> dict[str, Any]:
        if not isinstance(self._schema, dict):
            raise SchemaRefused("", "must be an object")
        # Closing a part of a sum would exclude the keys of its other parts.
        self._may_close = not any(map(_is_sum, _objects(self._schema)))
        read = self._node(self._schema, "", 0)
        for place, reference in self._references.items():
            if reference not in self._places:
                raise SchemaRefused(place, "points at no schema inside this one")
        return read

    def _node(self, node: Any, place: str, depth: int) -> Any:
        self._places.add(place)
        if depth > MAX_DEPTH:
            raise SchemaRefused(place, f"schemas nest deeper than {MAX_DEPTH}")
        if len(self._places) > MAX_NODES:
            raise SchemaRefused(place, f"more than {MAX_NODES} schemas")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise SchemaRefused(place, "must be a schema, an object or a bool")
        read: dict[str, Any] = {}
        for key, value in node.items():
            if key not in _NOTES:
                self._keyword(read, key, value, f"{place}/{escape(key)}", depth)
        if self._may_close and _is_open(read):
            read["additionalProperties"] = False
        return read

    def _keyword(self, read: dict[str, Any], key: str, value: Any, place: str, depth: int) -> None:
        if key in _ONE:
            read[key] = self._node(value, place, depth + 1)
        elif key in _LISTS:
            if not isinstance(value, list) or not value:
                raise SchemaRefused(place, "must be a list of schemas")
            read[key] = [
                self._node(part, f"{place}/{index}", depth + 1) for index, part in enumerate(value)
            ]
        elif key in _MAPS:
            if not isinstance(value, dict):
                raise SchemaRefused(place, "must be an object of schemas")
            read[key] = {
                name: self._node(part, f"{place}/{escape(name)}", depth + 1)
                for name, part in value.items()
            }
        elif key in _PLAIN:
            problem = _PLAIN[key](value)
            if problem is not None:
                raise SchemaRefused(place, problem)
            read[key] = _narrowed(value) if key in _LOWER | _UPPER else value
            if key == "$ref":
                self._references[place] = _target(value, place)
        elif key != "uniqueItems" or value is not False:
            raise SchemaRefused(place, f"the keyword {shown(key)} is not supported")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value; without recursion, since its depth was not checked yet."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _is_sum(node: Mapping[str, Any]) -> bool:
    return "allOf" in node or ("properties" in node and not _COMBINING.isdisjoint(node))


def _is_open(node: Mapping[str, Any]) -> bool:
    properties = node.get("properties")
    if not properties or "additionalProperties" in node or "patternProperties" in node:
        return False
    return set(node.get("required", ())) <= properties.keys()


def _target(reference: str, place: str) -> str:
    if reference != "#" and not reference.startswith("#/"):
        raise SchemaRefused(place, "only references inside the schema are followed (#/...)")
    return urllib.parse.unquote(reference[1:])


def escape(name: str) -> str:
    """A key as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
