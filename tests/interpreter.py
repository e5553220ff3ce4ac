"""Triton's interpreter without work of its that changes nothing: kernels take half the time.

To interpret a kernel it replaces the functions of triton.language, and looks through all of them
again at every call of one jit function by another. For each sum and product of integers it computes
whether they overflow, and drops what it finds unless a kernel is debugged. For each operation it
makes its table of numpy's types anew.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Replacement:
    """Replaces the language's functions as `original` does, once in a launch for each module."""

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self._original = original
        self._done: set[frozenset[str]] = set()

    def __call__(self, function: Any) -> Any:
        modules = _modules(function)
        if modules in self._done:
            return interpreter._LangPatchScope()
        scope = self._original(function)
        if not self._done:
            # The first is the launch itself, which takes everything back at its end.
            scope.restore = functools.partial(self._end, scope.restore)
        self._done.add(modules)
        return scope

    def _end(self, restore: Callable[[], None]) -> None:
        self._done.clear()
        restore()


@functools.cache
def _modules(function: Any) -> frozenset[str]:
    """Which modules of the language a function sees."""
    seen = (value for value in function.__globals__.values() if value is tl or value is tl.core)
    return frozenset(module.__name__ for module in seen)


class _NumpyTypes:
    """numpy's type of a Triton type, which depends on the type of the elements alone."""

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self._original = original
        self._known: dict[str, Any] = {}

    def __call__(self, triton_type: Any) -> Any:
        name = triton_type.scalar.name
        if name not in self._known:
            self._known[name] = self._original(triton_type)
        return self._known[name]


def quicken() -> None:
    """For the versions that this was written for; others are left as they are."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    interpreter._patch_lang = _Replacement(interpreter._patch_lang)
    interpreter._get_np_dtype = _NumpyTypes(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
