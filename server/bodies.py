"""Takes in a request body: its type, its size, its time, its JSON, its fields.

Everything is bounded before it is read. What is over a limit closes the connection, since a rest of
the body may still be on its way.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from ..configs.server import LimitsConfig, ServerConfig
from .errors import ApiError, body_too_large, invalid_json, unsupported_media_type
from .long_text import in_thread_if_long
from .sse import ClientGone
from .strict_json import read_object
from .validation import validate, without_unknown

DRAINED = 16
"""How many times the limit is read, and dropped, of a body that is over it, within the time that
any body has: a client that still sends when the connection closes sees a reset and no answer. With
the default limit that is 64 MiB, more than the public services take (32 to 50 MB)."""

_Fields = TypeVar("_Fields", bound=BaseModel)


@dataclass(frozen=True)
class Body(Generic[_Fields]):
    """A validated body, the object it was read from, and its size in bytes.

    The size bounds the length of every text in it, so it tells what may be slow to work on.
    """

    fields: _Fields
    document: dict[str, Any]
    size: int


async def read_body(request: Request, config: ServerConfig, model: type[_Fields]) -> Body[_Fields]:
    """The body as a model; raises ApiError 400, 408, 413 or 415, or ClientGone."""
    raw = await _read_json(request, config.limits)
    return await in_thread_if_long(len(raw), _parse, raw, model, config.allow_unknown_fields)


def _parse(raw: bytes, model: type[_Fields], allow_unknown: bool) -> Body[_Fields]:
    document = read_object(raw)
    if allow_unknown:
        document = without_unknown(model, document)
    return Body(validate(model, document), document, len(raw))


async def _read_json(request: Request, limits: LimitsConfig) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise unsupported_media_type("Content-Encoding is not supported; send the body as it is")
    media_type = request.headers.get("content-type")
    if media_type is not None:
        _check_type(media_type)
    body = await _read(request, limits)
    if not body.strip():
        raise invalid_json("The request body is empty; it must be a JSON object")
    if media_type is None:
        _check_type("")
    return body


def _check_type(media_type: str) -> None:
    name, _, parameters = media_type.partition(";")
    charset = parameters.replace(" ", "").replace('"', "").lower()
    if name.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise unsupported_media_type("Content-Type must be application/json")


async def _read(request: Request, limits: LimitsConfig) -> bytes:
    length = request.headers.get("content-length", "")
    announced = int(length[:20]) if length.isdecimal() else 0
    most = DRAINED * limits.max_body_bytes
    is_too_large = announced > limits.max_body_bytes
    if is_too_large and ("expect" in request.headers or announced > most):
        # The client asked before it sent anything, or sends more than would be read away.
        raise body_too_large(limits.max_body_bytes)
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                is_too_large = is_too_large or size > limits.max_body_bytes
                if not is_too_large:
                    body += piece
                elif size > most:
                    break
    except TimeoutError:
        if is_too_large:
            raise body_too_large(limits.max_body_bytes) from None
        message = f"The request body did not arrive within {limits.body_seconds:g} seconds"
        raise ApiError(
            408, message, code="request_timeout", headers={"connection": "close"}
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    if is_too_large:
        raise body_too_large(limits.max_body_bytes)
    return bytes(body)
