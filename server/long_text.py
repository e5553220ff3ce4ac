"""Work on texts that may be long, done in a thread so that it delays no other request.

Encoding a long word takes seconds, and so does validating a hundred thousand messages. Work in a
thread still shares the interpreter, but gives way every few milliseconds.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LONG_TEXT = 4096
"""Characters from which on work goes to a thread."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


async def in_thread_if_long(
    size: int,
    work: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **named: _Arguments.kwargs,
) -> _Result:
    """`work(*arguments)`, in a thread where a text of `size` characters makes it slow."""
    if size < LONG_TEXT:
        return work(*arguments, **named)
    return await asyncio.to_thread(work, *arguments, **named)
