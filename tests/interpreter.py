"""Triton's interpreter without work of its that changes nothing: kernels take a third of the time.

To interpret a kernel it replaces the functions of triton.language, and looks through all of them
again at every launch and at every call of one jit function by another. For each sum and product of
integers it computes whether they overflow, and drops what it finds unless a kernel is debugged. For
each operation it makes its table of numpy's types anew, and the type of every operand; and operands
of one shape are broadcast to that shape dimension by dimension.
"""

import dataclasses
import functools
import inspect
import math
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


class _Members:
    """Replaces the functions of a module or class as `original` does, which were listed before."""

    def __init__(self, original: Callable[..., None], *owners: Any) -> None:
        self._original = original
        self._known = {
            owner: [
                (name, _interpreted(member))
                for name, member in inspect.getmembers(owner)
                if tl.core.is_builtin(member)
            ]
            for owner in owners
        }

    def __call__(self, owner: Any, builder: Any, scope: Any) -> None:
        if owner not in self._known:
            self._original(owner, builder, scope)
            return
        for name, member in self._known[owner]:
            scope.set_attr(owner, name, member)


def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

    return call


def _known_block_types(original: Callable[..., None]) -> Callable[..., None]:
    """Equal types of blocks share what was checked and computed of the first."""
    known: dict[tuple, dict[str, Any]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, tl.core.tuple) else shape
        key = (element_ty.name, getattr(element_ty, "address_space", 0), *sizes)
        if key in known:
            self.__dict__.update(known[key])
        else:
            original(self, element_ty, shape)
            known[key] = dict(self.__dict__)

    return __init__


def _known_shapes() -> Callable[..., None]:
    """Makes a tensor as its class does; tensors of one shape share the object that tells it."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __init__(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in known:
            shape = tl.core.tuple([tl.constexpr(size) for size in sizes])
            known[sizes] = tl.constexpr(math.prod(sizes)), shape
        self.numel, self.shape = known[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return __init__


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of one shape are left as they are, as `original` leaves them."""

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() == other.is_block() and (
            not one.is_block() or one.shape.values == other.shape.values
        ):
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast_impl_value


def quicken() -> None:
    """For the versions that this was written for; others are left as they are."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    interpreter._patch_lang = _Replacement(interpreter._patch_lang)
    interpreter._get_np_dtype = _NumpyTypes(interpreter._get_np_dtype)
    owners = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    interpreter._patch_builtin = _Members(interpreter._patch_builtin, *owners)
    tl.block_type.__init__ = _known_block_types(tl.block_type.__init__)
    tl.tensor.__init__ = _known_shapes()
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
