"""The loop that everything else serves: receive, schedule, launch, commit, send.

Schedule, launch and commit are the pipeline's (`pipeline.py`).

What a failure costs: an exception while a step is computed costs the requests that cannot be
computed alone either (`recovery.py`); they end with "error" and give their pages back, and the
others go on. An engine that cannot compute a single token, or whose bookkeeping raises, is broken:
nothing after that could be trusted.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from ..model.sequence import SequenceOutput
from .admission import DuplicateId, Overloaded, Refused
from .batch import Step
from .launch import Runner
from .messages import (
    Abort,
    Answer,
    Command,
    Event,
    FlushCache,
    Heartbeat,
    Outputs,
    RequestOutput,
    RestoreSession,
    SaveSession,
    Shutdown,
    StartProfile,
    StopProfile,
    Submit,
)
from .pipeline import Pipeline
from .profiling import Profiler
from .recovery import recover
from .scheduler import Scheduler
from .sessions import Sessions

HEARTBEAT_SECONDS = 0.2

_log = logging.getLogger(__name__)


class Link(Protocol):
    """The engine's end of the channel."""

    def receive(self, timeout: float) -> list[Command]:
        """All commands that are here; waits up to `timeout` seconds for the first."""
        ...

    def send(self, event: Event) -> None: ...


class Watchdog(Protocol):
    """Ends the process when `restart` was not called for too long."""

    def restart(self) -> None: ...


class Engine:
    """Requests in, tokens out, until Shutdown."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        link: Link,
        watchdog: Watchdog,
        sessions: Sessions | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        """sessions: answers for saved prefixes, profiler: for profiles; without them every such
        command is refused."""
        self._runner = runner
        self._scheduler = scheduler
        self._link = link
        self._watchdog = watchdog
        self._sessions = sessions or Sessions(scheduler.cache, None)
        self._profiler = profiler or Profiler(None)
        self._pipeline = Pipeline(runner, scheduler, self._recover)

    def run(self) -> None:
        """Serve until Shutdown arrives; raises EngineBroken when nothing can be computed."""
        while True:
            self._watchdog.restart()
            outputs = self._receive()
            if outputs is None:
                return
            step, computed = self._pipeline.advance()
            self._send(step, outputs + computed)

    def _receive(self) -> list[RequestOutput] | None:
        """Take in commands, waiting only when there is nothing else to do; None for Shutdown."""
        self._scheduler.check_idle()
        self._profiler.check()
        timeout = 0.0 if self._scheduler.has_work else HEARTBEAT_SECONDS
        outputs: list[RequestOutput | None] = []
        for command in self._link.receive(timeout):
            match command:
                case Submit():
                    outputs.append(self._submit(command))
                case Abort(request_id):
                    outputs.append(self._scheduler.abort(request_id))
                case FlushCache():
                    self._link.send(Answer(self._scheduler.flush_cache()))
                case SaveSession() | RestoreSession():
                    self._link.send(self._sessions.answer(command))
                    self._watchdog.restart()
                case StartProfile() | StopProfile():
                    self._link.send(self._profiler.answer(command))
                    self._watchdog.restart()
                case Shutdown():
                    return None
        return [output for output in outputs if output is not None] + self._scheduler.expire()

    def _submit(self, submit: Submit) -> RequestOutput | None:
        try:
            self._scheduler.add(submit)
        except DuplicateId as error:
            # An answer under this id would end the stream of the request that owns it.
            _log.error("dropped a request: %s", error)
        except Refused as error:
            kind = "overloaded" if isinstance(error, Overloaded) else "invalid"
            return RequestOutput(submit.request_id, [], "error", error=str(error), error_kind=kind)
        return None

    def _recover(self, step: Step, error: Exception) -> Sequence[SequenceOutput]:
        _log.error("a step of %d requests failed", len(step.work), exc_info=error)
        return recover(self._runner, step, self._watchdog.restart)

    def _send(self, step: Step, outputs: list[RequestOutput]) -> None:
        stats = self._scheduler.stats()
        busy = step or outputs
        self._link.send(Outputs(outputs, stats) if busy else Heartbeat(stats))
