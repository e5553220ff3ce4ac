"""A profile of what the engine computes between two commands, written as a trace file.

The trace is what torch's profiler records, operations on the host and kernels on a GPU; Perfetto or
chrome://tracing shows it. Recording slows every step down, so it is for an operator who asked for
it with `--profile-dir`.
"""

import time
from pathlib import Path
from typing import Any

from .messages import Answer, StartProfile, StopProfile


class Profiler:
    """Answers the two commands; directory None: nothing is ever recorded."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._recording: Any = None

    def answer(self, command: StartProfile | StopProfile) -> Answer:
        """What became of a command; a trace that cannot be written is told, not raised."""
        if self._directory is None:
            return Answer(False, error="this server takes no profiles: set --profile-dir")
        if isinstance(command, StartProfile):
            return self._start()
        return self._stop(self._directory)

    def _start(self) -> Answer:
        if self._recording is not None:
            return Answer(False, error="a profile is being taken already")
        from torch import profiler  # noqa: PLC0415 - torch belongs to the engine process alone

        recording = profiler.profile(activities=profiler.supported_activities())
        try:
            recording.start()
        except RuntimeError as error:
            return Answer(False, error=f"no profile could be begun: {error}")
        self._recording = recording
        return Answer(True)

    def _stop(self, directory: Path) -> Answer:
        if self._recording is None:
            return Answer(False, error="no profile is being taken")
        recording, self._recording = self._recording, None
        name = f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}.json.gz"
        try:
            recording.stop()
            recording.export_chrome_trace(str(directory / name))
        except (OSError, RuntimeError) as error:
            return Answer(False, error=f"the trace could not be written: {error}")
        return Answer(True, file=name)
