"""uvicorn's HTTP protocol with the bounds it lacks, and with errors in our shape.

Stock, it keeps an endless header in memory and a half-sent request for ever. Here the head of a
request is bounded in bytes and in time; a connection that never sends one is closed like an idle
one.
"""

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..configs.server import LimitsConfig
from .errors import ApiError


def guarded_protocol(limits: LimitsConfig) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, with these limits."""

    class Guarded(_GuardedProtocol):
        max_head_bytes = limits.max_header_bytes
        head_seconds = limits.header_seconds

    return Guarded


class _GuardedProtocol(HttpToolsProtocol):
    """`_head_bytes` counts what came since the head of the current request began."""

    max_head_bytes: int
    head_seconds: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    # asyncio declares a BaseTransport; a TCP server is always given a Transport.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            self._check_head()

    def eof_received(self) -> None:
        """The client sends no more: half a request is told so, a whole one ends with it."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._in_head or not is_idle:
            self._refuse(400, "The connection was closed before the request was complete")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._head_bytes += len(self.url)
        if self._check_head():
            super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _check_head(self) -> bool:
        if self._head_bytes <= self.max_head_bytes:
            return True
        self._refuse(431, f"The head of the request is larger than {self.max_head_bytes} bytes")
        return False

    def _head_is_late(self) -> None:
        self._refuse(408, f"The request did not arrive within {self.head_seconds:g} seconds")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application and close; nothing more is read."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self._is_unanswered():
            self.transport.write(_response(ApiError(status, message)))
        self.transport.close()

    def _is_unanswered(self) -> bool:
        """Whether the client waits for an answer to the request that is still on its way."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return cycle.more_body and not cycle.response_started and not self.pipeline


def _response(error: ApiError) -> bytes:
    body = error.body()
    phrase = HTTPStatus(error.status).phrase
    head = (
        f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
