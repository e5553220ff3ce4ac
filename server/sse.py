"""Server-sent events, and answers that stop working when their client leaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

KEEP_ALIVE = b": keep-alive\n\n"

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`; it is cancelled and ClientGone raised as soon as the client leaves.

    The request's body was read before, so the only message left is the disconnect.
    """
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientGone
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends pieces as they come; `close` runs once, however the stream ends.

    interval: seconds of silence after which a comment is sent, for proxies that cut what is silent.
    0: never, since some clients read every line as JSON.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], close: Callable[[], None], interval: float
    ) -> None:
        super().__init__(status_code=200)
        self._pieces = pieces
        self._close = close
        self._interval = interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            scope["state"]["client_gone"] = True
        finally:
            self._close()

    async def _send_all(self, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        pieces = self._pieces if not self._interval else _kept_alive(self._pieces, self._interval)
        async for piece in pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _kept_alive(pieces: AsyncIterator[bytes], interval: float) -> AsyncIterator[bytes]:
    """The pieces, and a comment whenever none came for `interval` seconds."""
    while True:
        coming = asyncio.ensure_future(anext(pieces, None))
        try:
            while not (await asyncio.wait((coming,), timeout=interval))[0]:
                yield KEEP_ALIVE
            piece = coming.result()
        finally:
            coming.cancel()
        if piece is None:
            return
        yield piece
