"""The engine as the request handlers see it: submit, receive, abort; is it well?

One task reads the engine's events and sorts outputs into the open calls. A call is all that one
HTTP request asked for, so a request with many choices wakes up once for each step, and a slow
reader finds the outputs of several steps together.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from ..scheduler.messages import (
    Abort,
    Answer,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Heartbeat,
    Loaded,
    Outputs,
    Planned,
    Question,
    Ready,
    RequestOutput,
    StartPlan,
    Submit,
)
from ..scheduler.process import EngineDied
from .errors import overloaded, unavailable
from .start_failed import StartFailed

_log = logging.getLogger(__name__)


class EngineEnd(Protocol):
    """Our end of the line to an engine: `scheduler.process.EngineProcess`, or a scripted one."""

    def send(self, command: Command) -> None: ...

    async def recv(self) -> Event: ...


class Health(Enum):
    """Where the server stands; only READY takes requests."""

    LOADING = "the model is loading"
    READY = "ready"
    DRAINING = "the server is shutting down"
    DEAD = "the engine has stopped"


class EngineCall:
    """The sequences of one HTTP request, from submission until each has finished.

    `receive` raises ApiError when the engine is gone. `close` may come at any time; it aborts what
    has not finished.
    """

    def __init__(self, client: "EngineClient", request_ids: Sequence[str]) -> None:
        self._client = client
        self._open = dict.fromkeys(request_ids)
        self._arrived: list[RequestOutput] = []
        self._wake = asyncio.Event()
        self._is_lost = False

    @property
    def num_open(self) -> int:
        """Sequences the engine still works on, as far as was received."""
        return len(self._open)

    async def receive(self) -> list[RequestOutput]:
        """All outputs that came since the last call; waits for the first."""
        if not self._arrived and not self._is_lost:
            await self._wake.wait()
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        if not arrived and self._is_lost:
            raise unavailable(Health.DEAD.value)
        return arrived

    def finish(self, request_id: str) -> None:
        """No more is wanted of this sequence: its text ended, or its client asked for the end."""
        if request_id in self._open:
            del self._open[request_id]
            self._client.abandon(request_id)

    def abort(self) -> None:
        """End every open sequence; each receives a last output that says so."""
        for request_id in list(self._open):
            self.deliver(RequestOutput(request_id, [], "abort"))
            self._client.abandon(request_id)

    def close(self) -> None:
        for request_id in list(self._open):
            self.finish(request_id)

    def deliver(self, output: RequestOutput) -> None:
        """For the client's reader."""
        if output.finish_reason is not None:
            self._open.pop(output.request_id, None)
        self._arrived.append(output)
        self._wake.set()

    def lose(self) -> None:
        """For the client's reader: no more will come."""
        self._is_lost = True
        self._wake.set()


class EngineClient:
    """All open calls, the engine's gauges and its health."""

    def __init__(self, end: EngineEnd, heartbeat_seconds: float, hang_seconds: float) -> None:
        self._end = end
        self._heartbeat_seconds = heartbeat_seconds
        self._hang_seconds = hang_seconds
        self._calls: dict[str, EngineCall] = {}
        self._questions: deque[asyncio.Future[Answer]] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._is_draining = False
        self._failure: str | None = None
        self.ready = asyncio.Event()
        self.dead = asyncio.Event()
        self.stats = EngineStats()

    async def plan(self) -> StartPlan:
        """Wait until settings and checkpoint are checked; raises StartFailed. The first call."""
        event = await self._next()
        if isinstance(event, Planned):
            return event.plan
        raise StartFailed(f"the engine spoke out of turn: {type(event).__name__}")

    async def load(self) -> EngineInfo:
        """Wait until the checkpoint is loaded; raises StartFailed. Comes after `plan`."""
        event = await self._next()
        if isinstance(event, Loaded):
            return event.info
        raise StartFailed(f"the engine spoke out of turn: {type(event).__name__}")

    async def _next(self) -> Event:
        try:
            event = await self._end.recv()
        except EngineDied as error:
            raise StartFailed(str(error)) from error
        if isinstance(event, Failed):
            raise StartFailed(event.message, event.is_setting)
        return event

    def start(self) -> None:
        """Begin to read events."""
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    async def stop(self) -> None:
        """Stop reading; open calls are lost."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._lose_calls()

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, in one line."""
        return self._failure

    @property
    def num_open(self) -> int:
        return len(self._calls)

    @property
    def health(self) -> Health:
        """Of the engine itself, not of what we remember: silence counts as death."""
        if self.dead.is_set():
            return Health.DEAD
        if self._is_draining:
            return Health.DRAINING
        if not self.ready.is_set():
            return Health.LOADING
        # A busy engine is silent during a long step, an idle one never.
        patience = self._hang_seconds if self._calls else self._heartbeat_seconds
        is_silent = time.monotonic() - self._heard > max(patience, self._heartbeat_seconds)
        return Health.DEAD if is_silent else Health.READY

    def drain(self) -> None:
        """Take no more requests."""
        self._is_draining = True

    def check(self, num_sequences: int, capacity: int) -> None:
        """Raise ApiError 503 unless so many sequences can be taken now."""
        health = self.health
        if health is not Health.READY:
            raise unavailable(health.value)
        if len(self._calls) + num_sequences > capacity:
            raise overloaded(
                f"The server is busy: {len(self._calls)} of {capacity} places are taken and the "
                f"request needs {num_sequences}"
            )

    def submit(self, submits: Sequence[Submit]) -> EngineCall:
        """Start these sequences; their ids are not in use."""
        call = EngineCall(self, [submit.request_id for submit in submits])
        for submit in submits:
            self._calls[submit.request_id] = call
            self._end.send(submit)
        return call

    def abandon(self, request_id: str) -> None:
        """Forget a sequence; the engine frees its pages."""
        if self._calls.pop(request_id, None) is not None and not self.dead.is_set():
            self._end.send(Abort(request_id))

    async def ask(self, question: Question) -> Answer:
        """What the engine answers; it does so between two steps.

        Raises ApiError when the engine is gone.
        """
        if self.dead.is_set():
            raise unavailable(Health.DEAD.value)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions.append(answer)
        self._end.send(question)
        return await answer

    async def _read(self) -> None:
        try:
            while self._failure is None:
                event = await self._end.recv()
                self._heard = time.monotonic()
                if isinstance(event, Outputs):
                    self._sort(event)
                else:
                    self._note(event)
        except EngineDied as error:
            self._fail(str(error))
        except Exception:
            _log.exception("the engine cannot be heard any more")
            self._fail("the engine cannot be heard any more")

    def _sort(self, event: Outputs) -> None:
        self.stats = event.stats
        calls = self._calls
        for output in event.outputs:
            call = calls.get(output.request_id)
            if call is None:
                continue
            if output.finish_reason is not None:
                del calls[output.request_id]
            call.deliver(output)

    def _note(self, event: Event) -> None:
        match event:
            case Ready():
                self.ready.set()
            case Heartbeat(stats):
                self.stats = stats
            case Answer():
                answer = self._questions.popleft()
                if not answer.done():  # its client may have left
                    answer.set_result(event)
            case Failed(message):
                self._fail(message)
            case _:
                _log.warning("ignored an event out of turn: %s", type(event).__name__)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self.dead.set()
        self._lose_calls()

    def _lose_calls(self) -> None:
        lost = set(self._calls.values())
        self._calls.clear()
        for call in lost:
            call.lose()
        while self._questions:
            answer = self._questions.popleft()
            if not answer.done():
                answer.set_exception(unavailable(Health.DEAD.value))
