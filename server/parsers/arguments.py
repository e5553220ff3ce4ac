"""What the values of a call's parameters become in JSON.

The markup says of each value whether it is text or JSON; the tool's schema may know better.
"""

import json
from collections.abc import Sequence
from typing import Any

_SCALARS = {"number": (int, float), "integer": (int,), "boolean": (bool,)}


def quoted(text: str) -> str:
    """A JSON string; the insides of two pieces joined are the inside of the joined text."""
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str) -> str:
    """The text itself where it is JSON, else the text as a JSON string."""
    stripped = text.strip()
    return quoted(text) if _parse(stripped) is _BROKEN else stripped


def typed_value(text: str, types: frozenset[str]) -> str:
    """A value given as text whose schema asks for a number, integer or boolean."""
    value = _parse(text.strip())
    for name in types & _SCALARS.keys():
        is_flag = isinstance(value, bool)
        if isinstance(value, _SCALARS[name]) and is_flag == (name == "boolean"):
            return text.strip()
    return quoted(text)


def is_json_object(text: str) -> bool:
    """Whether the text is a whole JSON object."""
    return isinstance(_parse(text), dict)


class ParameterTypes:
    """Which parameters of which functions are scalars that the model may have written as text."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._scalars: dict[tuple[str, str], frozenset[str]] = {}
        for tool in tools:
            function = tool.get("function") or {}
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            for name, entry in properties.items() if isinstance(properties, dict) else ():
                types = _types(entry)
                if types & _SCALARS.keys() and "string" not in types:
                    self._scalars[str(function.get("name")), name] = types

    def scalar(self, function: str, parameter: str) -> frozenset[str]:
        """The scalar types asked for; empty where a text is a text."""
        return self._scalars.get((function, parameter), frozenset())


_BROKEN = object()


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _BROKEN


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _types(entry: object) -> frozenset[str]:
    types = entry.get("type") if isinstance(entry, dict) else None
    listed = types if isinstance(types, list) else [types]
    return frozenset(name for name in listed if isinstance(name, str))
