"""The two ends of the line between the API process and the engine process.

Commands go one way, events the other, each over a socket file in a directory that only this user
can enter. Frames are msgspec-typed: what does not decode to one of the types in `messages` is
dropped with a log line, and nothing is ever unpickled.
"""

import asyncio
import logging
import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from .messages import Command, Event

# Far above any honest message; a peer that sends a bigger frame is disconnected by zmq.
MAX_FRAME_BYTES = 1 << 28
RECONNECT_MS = 10
LINGER_MS = 1000
COMMANDS, EVENTS = "commands", "events"

_log = logging.getLogger(__name__)
_Message = TypeVar("_Message")


def new_directory() -> Path:
    """A new directory that only this user can enter, for the socket files.

    The system's folder for temporary files, or /tmp where that one's name is too long: a socket's
    path has 107 bytes at most.
    """
    directory = Path(tempfile.mkdtemp(prefix="minidsa-"))
    if len(os.fsencode(directory / COMMANDS)) <= zmq.IPC_PATH_MAX_LEN:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="minidsa-", dir="/tmp"))


def _address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}"


def _prepare(socket: zmq.Socket) -> None:
    # No high-water mark: neither side may ever block on the other.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.LINGER, LINGER_MS)


def decode(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message | None:
    """The message in a frame; None, with a log line, for anything outside the schema."""
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _log.warning("dropped a frame of %d bytes: %.200s", len(frame), error)
        return None


class EngineLink:
    """The engine's end, blocking. It owns both socket files."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        for socket, name in ((self._commands, COMMANDS), (self._events, EVENTS)):
            _prepare(socket)
            socket.bind(_address(directory, name))

    def receive(self, timeout: float) -> list[Command]:
        """All commands that are here; waits up to `timeout` seconds for the first."""
        commands: list[Command] = []
        wait_ms = int(timeout * 1000)
        while self._commands.poll(wait_ms):
            command = decode(self._decoder, self._commands.recv())
            if command is not None:
                commands.append(command)
            wait_ms = 0
        return commands

    def send(self, event: Event) -> None:
        self._events.send(self._encoder.encode(event))

    def close(self) -> None:
        """Close after what was sent has left, or after a second."""
        self._commands.close()
        self._events.close()
        self._context.term()


class ApiLink:
    """The API's end: sending never waits, receiving is awaited. One event loop only."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.asyncio.Context()
        # A plain socket for commands: they must be sendable from code that is being cancelled.
        self._commands = zmq.Socket(self._context, zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._pending: asyncio.Future[bytes] | None = None
        for socket, name in ((self._commands, COMMANDS), (self._events, EVENTS)):
            _prepare(socket)
            socket.connect(_address(directory, name))

    def send(self, command: Command) -> None:
        """Hand over a command; it is lost if the engine is gone."""
        self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def receive(self, gone: asyncio.Future[None], grace: float) -> Event | None:
        """The next event; None if `gone` is done and no event follows within `grace` seconds.

        May be cancelled and called again: no event is lost.
        """
        while True:
            pending = self._pending = self._pending or asyncio.ensure_future(self._events.recv())
            await asyncio.wait((pending, gone), return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                await asyncio.wait((pending,), timeout=grace)
            if not pending.done():
                return None
            self._pending = None
            event = decode(self._decoder, pending.result())
            if event is not None:
                return event

    def close(self) -> None:
        """Close at once; what was not sent yet is lost."""
        if self._pending is not None:
            self._pending.cancel()
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
