"""A profile of what the engine computes between two commands, written as a trace file.

The trace is what torch's profiler records, operations on the host and kernels on a GPU; Perfetto or
chrome://tracing shows it. Recording slows every step down, so it is for an operator who asked for
it with `--profile-dir`; it ends by itself, so that one who forgets it does not fill the memory.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .messages import Answer, StartProfile, StopProfile

RECORDED_SECONDS = 5.0
"""What is recorded at most, some 100 MB of trace; what the engine does after that is not in it."""
EXPORT_SECONDS = 300.0
"""How long a trace may take to be written before that counts as a hang."""
ALIVE_SECONDS = 0.2

_log = logging.getLogger(__name__)


def silence_profiler() -> None:
    """Keep the profiler's own lines off stderr, where a log of JSON may be written.

    Only what stands in the environment before torch is imported is heard.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Profiler:
    """Answers the two commands; directory None: nothing is ever recorded.

    `check` is to be called between steps. alive: called now and then while a trace is written.
    """

    def __init__(
        self,
        directory: Path | None,
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._alive = alive
        self._clock = clock
        self._recording: Any = None
        self._ends_at: float | None = None

    def answer(self, command: StartProfile | StopProfile) -> Answer:
        """What became of a command; a trace that cannot be written is told, not raised."""
        if self._directory is None:
            return Answer(False, error="this server takes no profiles: set --profile-dir")
        if isinstance(command, StartProfile):
            return self._start()
        return self._stop(self._directory)

    def check(self) -> None:
        """End a recording that has become long; it is kept until it is asked for.

        One that cannot be ended is lost, and no reason to end the engine.
        """
        if self._ends_at is None or self._clock() < self._ends_at:
            return
        self._ends_at = None
        try:
            self._recording.stop()
        except RuntimeError as error:
            _log.error("a profile could not be ended: %s", error)
            self._recording = None

    def _start(self) -> Answer:
        if self._recording is not None and self._ends_at is None:
            return Answer(False, error="a profile waits to be written: stop it first")
        if self._recording is not None:
            return Answer(False, error="a profile is being taken already")
        from torch import profiler  # noqa: PLC0415 - torch belongs to the engine process alone

        recording = profiler.profile(activities=profiler.supported_activities())
        try:
            recording.start()
        except RuntimeError as error:
            return Answer(False, error=f"no profile could be begun: {error}")
        self._recording, self._ends_at = recording, self._clock() + RECORDED_SECONDS
        return Answer(True)

    def _stop(self, directory: Path) -> Answer:
        if self._recording is None:
            return Answer(False, error="no profile is being taken")
        recording, is_running = self._recording, self._ends_at is not None
        self._recording = self._ends_at = None
        name = f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}.json.gz"
        try:
            if is_running:
                recording.stop()
            self._write(recording, directory / name)
        except (OSError, RuntimeError) as error:
            # A part of a trace is none, and on a full disk it stands in the way of the next.
            (directory / name).unlink(missing_ok=True)
            return Answer(False, error=f"the trace could not be written: {error}")
        return Answer(True, file=name)

    def _write(self, recording: Any, path: Path) -> None:
        """Write the trace in a thread, so that this one can say that the engine is alive."""
        failures: list[BaseException] = []

        def export() -> None:
            try:
                recording.export_chrome_trace(str(path))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=export, name="write-trace", daemon=True)
        thread.start()
        ends_at = self._clock() + EXPORT_SECONDS
        while thread.is_alive():
            thread.join(ALIVE_SECONDS)
            if self._clock() < ends_at:
                self._alive()
        if failures:
            raise failures[0]
