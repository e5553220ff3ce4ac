"""Tells a chat request's mistakes by the paths of the body that it was translated from."""

import contextlib
import re
from collections.abc import Iterator, Sequence

from .errors import ApiError

Addresses = Sequence[tuple[str, str]]
"""Paths of a chat request and those they stand for; of several that fit the first one counts."""


@contextlib.contextmanager
def readdressed(addresses: Addresses) -> Iterator[None]:
    """Inside, an ApiError that names a path of the chat request names the client's instead."""
    try:
        yield
    except ApiError as error:
        # Each problem that a message tells begins with its path.
        problems = error.message.split("; ")
        raise ApiError(
            error.status,
            "; ".join(_moved(problem, addresses) for problem in problems),
            code=error.code,
            param=None if error.param is None else _moved(error.param, addresses),
            headers=error.headers,
        ) from None


def _moved(text: str, addresses: Addresses) -> str:
    path = re.match(r"[\w.]*", text)
    rest = text[path.end() :] if path else text
    name = text[: len(text) - len(rest)]
    for old, new in addresses:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :] + rest
    return text
