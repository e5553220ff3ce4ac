"""Reads a request body as strict JSON, once.

Python's reader lets NaN and Infinity pass, keeps the last of two equal keys, takes UTF-16 and
recurses as deep as the stack. Each of these has taken a server down somewhere, so here they are
refused, with the path of the value where it is known.
"""

import json
import math
from typing import Any

from .errors import ApiError, invalid_json, invalid_value

MAX_DEPTH = 32
_MAX_DIGITS = 40
_HUGE = 10**_MAX_DIGITS


class _DuplicateKey(ValueError):
    pass


class _Hooks:
    """What Python's reader calls; remembers whether the document must be searched for bad values.

    Searching costs a pass over every value, so it is done for suspicious documents only.
    """

    def __init__(self) -> None:
        self.suspicious = False

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise _DuplicateKey(key)
                seen.add(key)
        return found

    def constant(self, name: str) -> float:
        self.suspicious = True
        return float(name)

    def float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self.suspicious = True
        return value

    def int(self, text: str) -> int:
        if len(text) <= _MAX_DIGITS:
            return int(text)
        self.suspicious = True
        return _HUGE


def read_object(body: bytes) -> dict[str, Any]:
    """The object a body holds; raises ApiError 400 for everything else."""
    hooks = _Hooks()
    try:
        text = body.decode("utf-8")
        document = json.loads(
            text,
            object_pairs_hook=hooks.pairs,
            parse_constant=hooks.constant,
            parse_float=hooks.float,
            parse_int=hooks.int,
        )
    except UnicodeDecodeError:
        raise invalid_json("The request body is not valid UTF-8") from None
    except _DuplicateKey as error:
        raise _duplicate(str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise invalid_json(f"The request body is not valid JSON: {error.msg} at {where}") from None
    if not isinstance(document, dict):
        raise invalid_json("The request body must be a JSON object")
    _check_depth(document)
    if hooks.suspicious or "\\u" in text:
        _search(document, "")
    return document


def _duplicate(key: str) -> ApiError:
    key = key.encode("ascii", "backslashreplace").decode()[:64]
    return ApiError(400, f"The key '{key}' is given twice", code="invalid_json", param=key)


def _too_deep() -> ApiError:
    return invalid_json(f"The request body is nested deeper than {MAX_DEPTH} levels")


def _check_depth(document: dict[str, Any]) -> None:
    """Level by level, so that depth costs no stack."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise _too_deep()


def _search(value: Any, path: str) -> None:
    """Raise for the first number that is not finite and the first text that is not Unicode."""
    if isinstance(value, dict):
        for key, child in value.items():
            _check_text(key, path or "the request body")
            _search(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _search(child, f"{path}.{index}" if path else str(index))
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise invalid_value(path, f"{path} must be a finite number")
    elif isinstance(value, int) and value >= _HUGE:
        raise invalid_value(path, f"{path} has more than {_MAX_DIGITS} digits")


def _check_text(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid_value(path, f"{path} holds half of a surrogate pair") from None
