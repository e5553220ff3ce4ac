"""The one middleware: request ids, the API key, counting. Pure ASGI.

Middleware that wraps the response (as Starlette's BaseHTTPMiddleware does) hides disconnects from
the handlers, so a client that left would keep its pages.
"""

import hmac
import re
import secrets
from collections.abc import Callable
from hashlib import sha256

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .messages_api.errors import shaped_body

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/version"})
CLIENT_GONE = 499
# OpenAI's clients read the first, Anthropic's the second.
_ID_HEADERS = (b"x-request-id", b"request-id")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Gate:
    """Stands before the application; `count(route, status)` hears of every answer."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, count: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._digest = None if api_key is None else _digest(api_key.encode())
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_GONE

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, request_id.encode()) for name in _ID_HEADERS),
                ]
            await send(message)

        try:
            if self._admits(scope, headers):
                await self._app(scope, receive, send_named)
            else:
                await _refuse(scope["path"], request_id, send_named)
        finally:
            if scope["state"].get("client_gone"):
                status = CLIENT_GONE
            self._count(_route(scope), status)

    def _admits(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Decided on the path as it was sent, never on a URL rebuilt from headers."""
        if self._digest is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token if scheme == b"Bearer" else headers.get(b"x-api-key", b"")
        return hmac.compare_digest(_digest(given), self._digest)


def _digest(key: bytes) -> bytes:
    # Of equal length whatever was sent, so the comparison tells nothing about the key's length.
    return sha256(key).digest()


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _route(scope: Scope) -> str:
    """The route's pattern, so that no path of a client becomes a label."""
    route = scope.get("route")
    return "unmatched" if route is None else route.path


async def _refuse(path: str, request_id: str, send: Send) -> None:
    error = ApiError(401, "The API key is missing or wrong", code="invalid_api_key")
    body = shaped_body(error, path, request_id)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
