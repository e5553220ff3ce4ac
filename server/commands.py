"""What the command `minidsa` does.

    minidsa serve [MODEL] [flags]          serve a checkpoint, the embedded one by default
    minidsa plan [MODEL] [flags]           say what memory that would take; needs config.json alone
    minidsa generate [PROMPT] [flags]      continue a prompt, without a server
    minidsa verify [MODEL] [flags]         compare a checkpoint's logprobs with transformers
    minidsa chat [--url URL]               talk to a running server in the terminal
    minidsa bench [--url URL] [flags]      load a running server and time its answers
    minidsa make-checkpoint DIR            write a small random checkpoint
    minidsa version

A mistake is one line on stderr: exit code 2 for a wrong flag or setting, 1 for a checkpoint or a
machine that cannot serve it.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import uvloop

from ..configs.log_lines import json_line, set_up_logging
from ..configs.resolve import validate
from ..configs.server import ServerConfig
from ..scheduler.process import EngineProcess, make_checkpoint, plan_start
from .client_commands import (
    BENCH_FLAGS,
    CHAT_FLAGS,
    add_bench_flags,
    add_chat_flags,
    run_bench,
    run_chat,
)
from .flags import (
    PLAN_FLAGS,
    SERVE_FLAGS,
    OneLineParser,
    UsageError,
    add_flags,
    add_plan_flags,
    read_settings,
    refuse_unknown,
)
from .http_client import CallFailed
from .offline_commands import (
    GENERATE_FLAGS,
    VERIFY_FLAGS,
    add_generate_flags,
    add_verify_flags,
    check_settings,
    run_generate,
    run_verify,
    unused_settings,
)
from .start_failed import StartFailed, refusing

EMBEDDED = Path(__file__).parents[1] / "checkpoints" / "tiny-dsa"
RANDOM_SEED = 0
KNOWN_FLAGS = (
    ("serve", SERVE_FLAGS),
    ("plan", (*PLAN_FLAGS, *SERVE_FLAGS)),
    ("generate", GENERATE_FLAGS),
    ("verify", VERIFY_FLAGS),
    ("chat", CHAT_FLAGS),
    ("bench", BENCH_FLAGS),
    ("make-checkpoint", ("--seed",)),
)


def run(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says and leave; arguments: those of `sys.argv` if None."""
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:
        # Whoever reads has enough; what is still buffered must not fail once more at the exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
        sys.exit(0)
    except UsageError as error:
        print(f"minidsa: {_line(error)}", file=sys.stderr)
        sys.exit(2)
    except StartFailed as error:
        print(f"minidsa: {_line(error)}", file=sys.stderr)
        sys.exit(2 if error.is_setting else 1)
    except CallFailed as error:
        print(f"minidsa: {_line(error)}", file=sys.stderr)
        sys.exit(1)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _run(arguments: list[str]) -> int:
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.version or parsed.command == "version":
        print(f"minidsa {version('minidsa')}")
        return 0
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    refuse_unknown(unknown, dict(KNOWN_FLAGS)[parsed.command])
    if parsed.command == "make-checkpoint":
        return _make_checkpoint(Path(parsed.directory), parsed.seed)
    if parsed.command in ("chat", "bench"):
        return run_chat(parsed) if parsed.command == "chat" else run_bench(parsed)
    if parsed.command in ("generate", "verify"):
        check_settings(parsed)
    config = _with_checkpoint(read_settings(parsed))
    if parsed.command == "serve":
        return _serve(config)
    if unused := unused_settings(parsed.command, config):
        print(f"minidsa: {parsed.command} does not use {', '.join(unused)}", file=sys.stderr)
    if parsed.command in ("generate", "verify"):
        return (run_generate if parsed.command == "generate" else run_verify)(parsed, config)
    return _plan(config, parsed.gpu, parsed.tp)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="minidsa", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a checkpoint", allow_abbrev=False)
    serve.add_argument(
        "model", nargs="?", help="folder of a checkpoint in Hugging Face layout [tiny-dsa]"
    )
    add_flags(serve)
    plan = commands.add_parser(
        "plan", help="say what memory a checkpoint would take", allow_abbrev=False
    )
    plan.add_argument("model", nargs="?", help="folder with a config.json; no weights are needed")
    add_plan_flags(plan)
    add_flags(plan)
    add_generate_flags(
        commands.add_parser("generate", help="continue a prompt", allow_abbrev=False)
    )
    add_verify_flags(
        commands.add_parser("verify", help="compare with transformers", allow_abbrev=False)
    )
    add_chat_flags(commands.add_parser("chat", help="talk to a running server", allow_abbrev=False))
    add_bench_flags(commands.add_parser("bench", help="load a running server", allow_abbrev=False))
    make = commands.add_parser(
        "make-checkpoint", help="write a small random checkpoint", allow_abbrev=False
    )
    make.add_argument("directory", help="folder to write to: a new one, or an empty one")
    make.add_argument(
        "--seed", type=int, default=RANDOM_SEED, help=f"of the weights [{RANDOM_SEED}]"
    )
    commands.add_parser("version", help="print the version")
    return parser


def _serve(config: ServerConfig) -> int:
    set_up_logging(config.engine.log_format, "server")
    say = _say_json if config.engine.log_format == "json" else _say
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_served(config, say))


async def _served(config: ServerConfig, say: Callable[[str], None]) -> int:
    # The engine begins with importing torch, which takes the longest: what serves is imported
    # beside it.
    with (
        _watching_signals() as signals,
        contextlib.closing(EngineProcess.start(config.engine)) as engine,
    ):
        from .serving import Serving  # noqa: PLC0415 - see above

        return await Serving(config, say, engine, signals).run()


@contextlib.contextmanager
def _watching_signals() -> Iterator[asyncio.Queue[int]]:
    """Signals that ask to leave, from before there is an engine until after it has ended."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in numbers:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _with_checkpoint(config: ServerConfig) -> ServerConfig:
    """Valid settings whose model is a folder that is there."""
    try:
        validate(config.engine)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not config.engine.model:
        engine = dataclasses.replace(config.engine, model=str(_default_checkpoint()))
        config = dataclasses.replace(config, engine=engine)
    if not Path(config.engine.model).is_dir():
        hub = "; checkpoints are not downloaded: `hf download NAME --local-dir DIR` first"
        raise StartFailed(f"{config.engine.model} is not a folder with a checkpoint{hub}")
    return config


def _plan(config: ServerConfig, gpu: str | None, ranks: int) -> int:
    with refusing():
        lines = plan_start(config.engine, gpu, ranks)
    for line in lines:
        print(line)
    return 0


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError as error:
        # Nobody reads; serving goes on, and this is told once.
        logging.getLogger(__name__).warning("stdout cannot be written: %s", error.strerror)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _say_json(line: str) -> None:
    _say(json_line("server", "info", line, time.time()))


def _make_checkpoint(directory: Path, seed: int) -> int:
    if directory.exists() and any(directory.iterdir()):
        raise StartFailed(f"{directory} is not empty; a checkpoint is written to a new folder")
    try:
        make_checkpoint(str(directory), seed)
    except RuntimeError as error:
        raise StartFailed(str(error)) from None
    again = f"{sys.argv[0]} serve {directory}"
    print(f"wrote a random checkpoint to {directory}; serve it with: {again}")
    return 0


def _default_checkpoint() -> Path:
    """The checkpoint of the source tree, else a random one that is written once and kept."""
    if (EMBEDDED / "config.json").is_file():
        return EMBEDDED
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidsa"
    target = cache / f"random-{version('minidsa')}-{RANDOM_SEED}"
    if (target / "config.json").is_file():
        return target
    _say(f"no checkpoint given: writing a small random one to {target}")
    cache.mkdir(parents=True, exist_ok=True)
    # Written aside and moved, so that an interrupted start leaves nothing half made.
    aside = Path(tempfile.mkdtemp(dir=cache))
    try:
        make_checkpoint(str(aside), RANDOM_SEED)
        aside.rename(target)
    except RuntimeError as error:
        raise StartFailed(str(error)) from None
    except OSError:
        # Another start was faster.
        if not (target / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target
