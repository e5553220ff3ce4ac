"""What the engine process does from its first line to its last.

The order of a start is fixed: check settings and every header, say what is going to be loaded, load
it, say what was loaded, compute a real prefill and a real decode, and only then say that requests
may come. Each of these stages has a limit of its own for how long it may show no progress.
Whatever goes wrong reaches the operator as one line; a traceback is kept for what is a bug.
"""

import dataclasses
import faulthandler
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import zmq

from ..attention.sparse.selection_counts import SelectionCounts
from ..configs.engine import EngineConfig
from ..configs.log_lines import set_up_logging
from ..configs.sampling import SamplingParams
from ..configs.setting_error import SettingError
from ..kv_cache.cache import KvCache
from .channel import EngineLink
from .engine import Engine
from .grammar import GrammarCompiler
from .launch import Runner, launch
from .messages import (
    EngineInfo,
    Failed,
    Handling,
    Heartbeat,
    Loaded,
    Planned,
    Ready,
    StartPlan,
    Submit,
)
from .profiling import Profiler, silence_profiler
from .recovery import EngineBroken
from .scheduler import Scheduler
from .sessions import Sessions
from .speculative import new_speculation

if TYPE_CHECKING:
    from ..model.runner import ModelRunner

WARM_UP_TOKENS = 16

_log = logging.getLogger(__name__)


class LoadedEngine(Protocol):
    """A checkpoint on its device, ready to compute."""

    @property
    def runner(self) -> Runner: ...
    @property
    def kv_cache(self) -> KvCache: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def selection(self) -> SelectionCounts | None: ...
    def prepare(self, alive: Callable[[], None]) -> None:
        """Make what steps will need, as soon as it may take its time; `alive` as in `load`."""
        ...


class CheckedStart(Protocol):
    """Settings and a checkpoint that fit each other, before any weight is read."""

    @property
    def plan(self) -> StartPlan: ...
    def load(self, alive: Callable[[], None]) -> LoadedEngine:
        """Read the weights; `alive` is called whenever there was progress."""
        ...


Checker = Callable[[EngineConfig], CheckedStart]


class StartRefused(Exception):
    """The settings or the checkpoint cannot be served; the text is for the operator."""

    def __init__(self, message: str, is_setting: bool) -> None:
        super().__init__(message)
        self.is_setting = is_setting


def serve(directory: str, config: EngineConfig, check: Checker) -> None:
    """Run the engine until it is told to leave; exits with 1 if it cannot start or go on."""
    set_up_logging(config.log_format, "engine")
    silence_profiler()
    faulthandler.enable()
    # Chained to the default, which ends the process.
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    _ignore_signals()
    _follow_parent(Path(directory))
    try:
        link = EngineLink(Path(directory))
    except zmq.ZMQError:
        if Path(directory).is_dir():
            raise
        # The parent was gone before this began, and its directory is, too.
        sys.exit(1)
    try:
        _run(link, config, check)
    except StartRefused as error:
        _fail(link, str(error), error.is_setting)
    except EngineBroken as error:
        _fail(link, str(error))
    except Exception as error:
        _log.exception("the engine cannot go on")
        _fail(link, f"{type(error).__name__}: {error}")
    finally:
        HangWatchdog(0).restart()
        link.close()


def _run(link: EngineLink, config: EngineConfig, check: Checker) -> None:
    loading = HangWatchdog(config.load_timeout)
    loading.restart()
    try:
        checked = check(config)
        loading.restart()
        directory = _session_directory(config)
        profile_dir = _folder("profile_dir", config.profile_dir)
        link.send(Planned(checked.plan))
        loaded = checked.load(loading.restart)
        sessions = _sessions(config, loaded, directory)
    except (ValueError, OSError) as error:
        raise StartRefused(str(error), isinstance(error, SettingError)) from error
    info = loaded.info
    link.send(Loaded(info))
    warming = HangWatchdog(config.warm_up_timeout)
    warming.restart()
    loaded.prepare(warming.restart)
    warm_up(loaded.runner, new_scheduler(config, info, loaded.kv_cache))
    scheduler = new_scheduler(config, info, loaded.kv_cache, _grammars(config, info))
    scheduler.counters.selection = loaded.selection
    scheduler.check_idle()
    link.send(Ready())
    watchdog = HangWatchdog(config.hang_timeout)

    def alive() -> None:
        watchdog.restart()
        link.send(Heartbeat(scheduler.stats()))

    profiler = Profiler(profile_dir, alive)
    Engine(loaded.runner, scheduler, link, watchdog, sessions, profiler).run()


def new_scheduler(
    config: EngineConfig, info: EngineInfo, cache: KvCache, grammars: GrammarCompiler | None = None
) -> Scheduler:
    """The scheduler of a loaded engine; without `grammars` requests that have one are refused."""
    limits = dataclasses.replace(
        config.scheduler,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_prefill_tokens=info.max_prefill_tokens,
    )
    speculation = new_speculation(
        info.speculative, info.num_speculative_tokens, adaptive=config.speculative.adaptive
    )
    return Scheduler(
        limits, cache, info.max_model_len, info.vocab_size, speculation, grammars=grammars
    )


def _session_directory(config: EngineConfig) -> Path | None:
    """The folder for sessions, which is there now; raises SettingError where it cannot be used."""
    if config.cache.session_dir is not None and not config.cache.prefix_reuse:
        raise SettingError("cache.session_dir is given, but cache.prefix_reuse is off")
    return _folder("cache.session_dir", config.cache.session_dir)


def _folder(setting: str, value: str | None) -> Path | None:
    """A folder that is written to, made where it is missing; raises SettingError."""
    if value is None:
        return None
    if not value:
        raise SettingError(f"{setting} is empty: name a folder")
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"{setting} {value}: {error.strerror}") from error
    return Path(value)


def _sessions(config: EngineConfig, loaded: LoadedEngine, directory: Path | None) -> Sessions:
    if directory is None:
        return Sessions(loaded.kv_cache, None)
    from ..kv_cache.session_file import (  # noqa: PLC0415 - torch belongs to the child alone
        SessionFiles,
        fingerprint,
    )

    # Only an engine with a model is ever started with a folder.
    storage = cast("ModelRunner", loaded.runner).storage
    return Sessions(
        loaded.kv_cache, SessionFiles(directory, storage, fingerprint(Path(config.model)))
    )


def _grammars(config: EngineConfig, info: EngineInfo) -> GrammarCompiler | None:
    """None where the tokenizer does not allow them: everything else can be served still."""
    try:
        return GrammarCompiler.from_directory(config.model, info.vocab_size, info.eos_token_ids)
    except ValueError as error:
        _log.warning("structured output is refused: %s", error)
        return None


def warm_up(runner: Runner, scheduler: Scheduler) -> None:
    """Generate two tokens, one by prefill and one by decode; raises EngineBroken on a bad row."""
    longest = scheduler.limits.max_tokens
    length = max(1, min(WARM_UP_TOKENS, longest - 2))
    # Where the context holds no more than two tokens, the prefill is all there is.
    params = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
    scheduler.add(Submit("warm-up", [0] * length, params, handling=Handling(uses_cache=False)))
    while step := scheduler.schedule():
        for output in scheduler.commit(step, launch(runner, step)):
            if output.error is not None:
                raise EngineBroken(f"the warm-up pass failed: {output.error}")


class HangWatchdog:
    """Ends the process by SIGALRM, all stacks on stderr, when `restart` stays away for long.

    The timer is the kernel's and the stacks are written in C, so it also sees a thread that never
    lets go of the interpreter lock. There is one timer in a process: the watchdog that was
    restarted last is the one that counts, and one of 0 seconds turns it off.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def restart(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)


def _ignore_signals() -> None:
    """How running requests end is for the API process to decide; see `process`."""
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _follow_parent(directory: Path) -> None:
    """Leave as soon as the API process is gone, whatever the engine is doing."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def _fail(link: EngineLink, message: str, is_setting: bool = False) -> None:
    link.send(Failed(" ".join(message.split()), is_setting))
    sys.exit(1)
