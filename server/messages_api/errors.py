"""Errors in the shape of the Messages API, whose clients show `error.message` alone."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from ..errors import ApiError

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
)


def error_body(error: ApiError, request_id: str) -> bytes:
    """The JSON of an error."""
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    detail = {"type": kind, "message": error.message}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})


def is_messages_path(path: str) -> bool:
    """Whether clients of this API are to read the answer."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def shaped_body(error: ApiError, path: str, request_id: str) -> bytes:
    """The JSON of an error as clients of the route at `path` read it."""
    return error_body(error, request_id) if is_messages_path(path) else error.body()
