"""The engine process as the API process sees it: start it, talk to it, notice its death.

Nothing here imports torch, so the API process never does. The engine is a spawned child that
ignores SIGINT and SIGTERM: Ctrl-C and service supervisors signal the whole group, and how running
requests end is for the API process to decide. It leaves when it is told to, when it breaks, or when
its parent is gone.
"""

import asyncio
import atexit
import multiprocessing
import multiprocessing.resource_tracker
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

from ..configs.engine import EngineConfig
from ..configs.setting_error import SettingError
from ..model.planning import plan_lines
from .channel import ApiLink, new_directory
from .messages import Command, Event, Loaded, Ready, Shutdown

if TYPE_CHECKING:
    from .worker import CheckedStart

# After the engine's death its last words may still be on the way.
LAST_WORDS_SECONDS = 0.1

Target = Callable[[str, EngineConfig], None]


class EngineDied(Exception):
    """The engine process has ended and everything it said was read; the text is one line."""

    def __init__(self, exitcode: int | None, stage: "Stage | None" = None) -> None:
        super().__init__(_how_it_ended(exitcode, stage))
        self.exitcode = exitcode


@dataclass(frozen=True)
class Stage:
    """What the engine is at, and for how long it may do that without a sign of progress."""

    doing: str
    setting: str
    seconds: float


def _how_it_ended(exitcode: int | None, stage: Stage | None) -> str:
    doing = "" if stage is None else f" while it was {stage.doing}"
    if exitcode == -signal.SIGALRM and stage is not None:
        return (
            f"the engine hung{doing}: no progress within {stage.setting} = {stage.seconds:g} "
            "seconds; the stacks of its threads are above"
        )
    if exitcode is None or exitcode >= 0:
        return f"the engine process has ended with exit code {exitcode}{doing}"
    perhaps = "; is memory short?" if exitcode == -signal.SIGKILL else ""
    return f"the engine process was ended by {_signal_name(-exitcode)}{doing}{perhaps}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class EngineProcess:
    """A running engine; made by `start`, given up by `stop` or `close`.

    Events come in this order: Planned, Loaded, Ready, then Outputs and Heartbeats; Failed may come
    at any time and is the last. `send` may be called from anywhere in the thread of the event loop.
    """

    def __init__(self, process: SpawnProcess, directory: Path, config: EngineConfig) -> None:
        """Use `start`."""
        self._process = process
        self._config = config
        self._stage = Stage("loading", "engine.load_timeout", config.load_timeout)
        self._directory = directory
        self._link = ApiLink(directory)
        self._gone: asyncio.Future[None] | None = None
        self._closed = False
        atexit.register(self.close)

    @classmethod
    def start(cls, config: EngineConfig, target: Target | None = None) -> "EngineProcess":
        """Spawn the engine and return at once; what becomes of it is told by its events.

        target: what the child runs; tests hand over an engine of their own.
        """
        directory = new_directory()
        process = multiprocessing.get_context("spawn").Process(
            target=target or _serve,
            args=(str(directory), config),
            name="minidsa-engine",
        )
        try:
            _start_without_signals(process)
            return cls(process, directory, config)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._process.is_alive()

    @property
    def exitcode(self) -> int | None:
        """None while the engine runs; negative if a signal ended it."""
        return self._process.exitcode

    def send(self, command: Command) -> None:
        """Hand a command to the engine; never waits, and is without effect once it is gone."""
        if not self._closed:
            self._link.send(command)

    async def recv(self) -> Event:
        """The next event; raises EngineDied when there will be none any more.

        One reader at a time. May be cancelled without losing an event.
        """
        event = await self._link.receive(self._watch(), LAST_WORDS_SECONDS)
        if event is None:
            raise EngineDied(self._reap(), self._stage)
        self._note_stage(event)
        return event

    async def wait(self) -> int | None:
        """Wait for the end of the process; returns its exit code."""
        await asyncio.wait((self._watch(),))
        return self._reap()

    async def stop(self, timeout: float = 5.0) -> int | None:
        """Ask the engine to leave, end it after `timeout` seconds; returns its exit code."""
        self.send(Shutdown())
        await asyncio.wait((self._watch(),), timeout=timeout)
        self.close()
        return self.exitcode

    def close(self) -> None:
        """End the engine at once and remove its directory; safe to call again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._gone is not None and not self._gone.done():
            self._gone.get_loop().remove_reader(self._process.sentinel)
            self._gone.cancel()
        self._process.kill()
        self._process.join()
        self._link.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _note_stage(self, event: Event) -> None:
        config = self._config
        if isinstance(event, Loaded):
            self._stage = Stage("warming up", "engine.warm_up_timeout", config.warm_up_timeout)
        elif isinstance(event, Ready):
            self._stage = Stage("computing a step", "engine.hang_timeout", config.hang_timeout)

    def _watch(self) -> "asyncio.Future[None]":
        """Done when the process has ended."""
        if self._gone is None:
            loop = asyncio.get_running_loop()
            gone = self._gone = loop.create_future()

            def notice() -> None:
                loop.remove_reader(self._process.sentinel)
                gone.set_result(None)

            loop.add_reader(self._process.sentinel, notice)
        return self._gone

    def _reap(self) -> int | None:
        # The sentinel fires when the process closes its files, an instant before it can be reaped.
        self._process.join(timeout=1.0)
        return self._process.exitcode


def make_checkpoint(directory: str, seed: int) -> None:
    """Write a small random checkpoint; in a child, so that torch stays out of this process.

    Raises RuntimeError if the child fails; its message is on stderr.
    """
    if _run_in_child(_make_checkpoint, directory, seed):
        raise RuntimeError(f"no checkpoint was written to {directory}")


def verify_checkpoint(
    config: EngineConfig,
    num_sequences: int,
    num_tokens: int,
    first_id: int,
    tolerance: float | None,
) -> int:
    """Compare a checkpoint with transformers in a child, see `verify.py`; returns its exit code.

    What was measured is on stdout, and on stderr, in one line, why nothing could be: 0 where both
    agree, 1 where not or where the checkpoint cannot be loaded, 2 for a wrong setting.
    """
    code = _run_in_child(_verify, config, num_sequences, num_tokens, first_id, tolerance)
    if code < 0:
        sys.stderr.write(f"minidsa: verify was ended by signal {-code}\n")
    return 1 if code < 0 else code


def plan_start(config: EngineConfig, gpu: str | None, ranks: int) -> list[str]:
    """The memory that a start would take, from config.json alone; see `model.planning`."""
    return plan_lines(config, gpu, ranks)


def _run_in_child(target: Callable[..., None], *args: object) -> int:
    """Run a function in a process of its own; its exit code, below 0 where a signal ended it."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    process.join()
    return process.exitcode or 0


def _start_without_signals(process: SpawnProcess) -> None:
    """Start with SIGINT and SIGTERM held back, so none reaches the child before it ignores them."""
    # It starts on first use, and unblocks both signals when it does: before, not in between.
    multiprocessing.resource_tracker.ensure_running()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _serve(directory: str, config: EngineConfig) -> None:
    from .worker import serve  # noqa: PLC0415 - the engine's parts belong to the child alone

    serve(directory, config, _check)


def _check(config: EngineConfig) -> "CheckedStart":
    # Inside the engine's own time limit: even the import can hang, on a file system that is gone.
    from ..model.loading import check_start  # noqa: PLC0415 - torch belongs to the child alone

    return check_start(config)


def _make_checkpoint(directory: str, seed: int) -> None:
    from ..model.make_checkpoint import (  # noqa: PLC0415 - the same
        PRESETS,
        write_random_checkpoint,
    )

    write_random_checkpoint(Path(directory), PRESETS["default"], seed)


def _verify(
    config: EngineConfig,
    num_sequences: int,
    num_tokens: int,
    first_id: int,
    tolerance: float | None,
) -> None:
    from .offline import GenerationFailed  # noqa: PLC0415 - the same
    from .verify import Texts, verify  # noqa: PLC0415 - the same

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        agrees = verify(config, Texts(num_sequences, num_tokens, first_id), tolerance, say)
    except ImportError as error:
        install = f"{sys.executable} -m pip install -e '.[verify]'"
        sys.exit(f"minidsa: verify needs transformers: {install} ({error})")
    except (ValueError, OSError, GenerationFailed) as error:
        sys.stderr.write(f"minidsa: {' '.join(str(error).split())}\n")
        sys.exit(2 if isinstance(error, SettingError) else 1)
    say("agrees" if agrees else "does not agree")
    sys.exit(0 if agrees else 1)
