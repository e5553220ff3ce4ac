"""The one middleware: request ids, API keys and their limits, counting. Pure ASGI.

Middleware that wraps the response (as Starlette's BaseHTTPMiddleware does) hides disconnects from
the handlers, so a client that left would keep its pages.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .keys import Keyring
from .messages_api.errors import shaped_body
from .page import PAGE_FILES

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/version", *PAGE_FILES})
GENERATING_PATHS = frozenset(
    {"/v1/messages", "/v1/responses"}
    | {f"{prefix}/{name}" for prefix in ("", "/v1") for name in ("chat/completions", "completions")}
)
CLIENT_GONE = 499
# OpenAI's clients read the first, Anthropic's the second.
_ID_HEADERS = (b"x-request-id", b"request-id")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Gate:
    """Stands before the application; `note` hears of every answer: its status and seconds."""

    def __init__(
        self, app: ASGIApp, keyring: Keyring | None, note: Callable[[Scope, int, float], None]
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        start, request_id = time.monotonic(), _request_id(headers)
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
            with self._admitted(scope, headers):
                await self._app(scope, receive, send_named)
        except ApiError as error:
            await _refuse(error, scope["path"], request_id, send_named)
        finally:
            if scope["state"].get("client_gone"):
                status = CLIENT_GONE
            self._note(scope, status, time.monotonic() - start)

    @contextlib.contextmanager
    def _admitted(self, scope: Scope, headers: dict[bytes, bytes]) -> Iterator[None]:
        """Raise ApiError 401 or 429 at once, or hold a place of the key for as long as it takes.

        Decided on the path as it was sent, never on a URL rebuilt from headers.
        """
        scope["state"]["owner"] = b""
        if self._keyring is None or scope["path"] in OPEN_PATHS:
            yield
            return
        key = self._keyring.find(headers)
        if key is None:
            challenge = {"www-authenticate": "Bearer"}
            message = "The API key is missing or wrong"
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        scope["state"]["owner"] = key.digest
        # Reading metrics or counting tokens is not what a key's limits are for.
        if scope["path"] not in GENERATING_PATHS:
            yield
            return
        key.enter()
        try:
            yield
        finally:
            key.leave()


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


async def _refuse(error: ApiError, path: str, request_id: str, send: Send) -> None:
    body = shaped_body(error, path, request_id)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(name.encode(), value.encode()) for name, value in (headers | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
