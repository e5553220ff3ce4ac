"""The flags of the commands that talk to a running server, `chat` and `bench`."""

import argparse
import contextlib
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .bench_command import Load, bench
from .bench_plot import plot
from .chat_command import Terminal, chat
from .flags import UsageError
from .http_client import ServerAddress

SLOWEST = 0.001
"""Arrivals a second; a load of fewer would take days."""
DEFAULT_URL = "http://127.0.0.1:8000"
_SAMPLING = (("--temperature", float), ("--top-p", float), ("--seed", int), ("--max-tokens", int))
CHAT_FLAGS = ("--url", "--system", "--thinking", *(name for name, _ in _SAMPLING))
_LOAD = (
    ("--num-requests", int, "requests of the whole run"),
    ("--concurrency", int, "requests at once, in a closed loop"),
    ("--rate", float, "arrivals a second, in an open loop instead"),
    ("--prompt-words", int, "words of a prompt"),
    ("--max-tokens", int, "tokens of an answer"),
    ("--seed", int, "of the prompts and the arrivals"),
    ("--ttft-limit", float, "seconds to the first token that count as good"),
    ("--tpot-limit", float, "seconds a token that count as good"),
)
BENCH_FLAGS = ("--url", "--output", "--plot", *(name for name, _, _ in _LOAD))


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server [{DEFAULT_URL}]")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--thinking", action="store_true", help="let the model think first")
    for name, kind in _SAMPLING:
        parser.add_argument(name, type=kind, help="as in a request")


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server [{DEFAULT_URL}]")
    parser.add_argument("--output", type=Path, help="a file for the report, as JSON")
    parser.add_argument("--plot", type=Path, help="a file for the times, as a picture (SVG)")
    for name, kind, text in _LOAD:
        default = vars(Load())[_field(name)]
        shown = "" if default is None else f" [{default}]"
        parser.add_argument(name, type=kind, default=default, help=text + shown)


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def run_chat(parsed: argparse.Namespace) -> int:
    """Talk until the input ends; raises CallFailed where there is no server."""
    given = {_field(name): vars(parsed)[_field(name)] for name, _ in _SAMPLING}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    fields["chat_template_kwargs"] = {"thinking": parsed.thinking}
    terminal = Terminal(_write, sys.stdout.isatty())
    return chat(_address(parsed), fields, parsed.system, _lines(), terminal)


def _lines() -> Iterator[str]:
    typed = sys.stdin.isatty()
    if typed:
        # From then on `input` lets lines be edited and called back. Not every Python has it.
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
    while True:
        try:
            yield input("> " if typed else "")
        except (EOFError, KeyboardInterrupt):
            return


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def run_bench(parsed: argparse.Namespace) -> int:
    """Run the load; 1 where a request failed. Raises CallFailed, UsageError."""
    load = Load(**{_field(name): vars(parsed)[_field(name)] for name, _, _ in _LOAD})
    for name, _, _ in _LOAD:
        value = vars(load)[_field(name)]
        if name != "--seed" and value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}; it must be positive and finite")
    if load.rate is not None and load.rate < SLOWEST:
        raise UsageError(f"--rate is {load.rate}; it must be at least {SLOWEST}")
    # A load is not run in vain.
    for flag, path in (("--output", parsed.output), ("--plot", parsed.plot)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no folder {path.parent}")
    report = bench(_address(parsed), load, lambda line: _write(f"{line}\n"))
    if parsed.output is not None:
        _write_file("--output", parsed.output, json.dumps(report, indent=2) + "\n")
    if parsed.plot is not None:
        _write_file("--plot", parsed.plot, plot(report))
    return 1 if report["failed"] else 0


def _write_file(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def _address(parsed: argparse.Namespace) -> ServerAddress:
    return ServerAddress(parsed.url.rstrip("/"))
