"""The flags of the commands that load a checkpoint and serve nobody: `generate` and `verify`."""

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from ..configs.server import ServerConfig
from ..scheduler.process import verify_checkpoint
from .errors import ApiError
from .flag_table import GENERATE_GROUPS, VERIFY_GROUPS, Group
from .flags import UsageError, add_flags
from .start_failed import StartFailed, refusing
from .tokenizer_files import read_settings

_SAMPLING = (
    ("--max-tokens", int),
    ("--min-tokens", int),
    ("--temperature", float),
    ("--top-p", float),
    ("--top-k", int),
    ("--min-p", float),
    ("--presence-penalty", float),
    ("--frequency-penalty", float),
    ("--repetition-penalty", float),
    ("--attention", str),
    ("--index-topk", int),
)


def _names(groups: tuple[Group, ...]) -> tuple[str, ...]:
    return (*(flag.name for _, flags in groups for flag in flags), "--config", "--set")


GENERATE_FLAGS = (
    "--model", "--file", "--chat", "--stop", "--ignore-eos", *(name for name, _ in _SAMPLING),
    *_names(GENERATE_GROUPS),
)  # fmt: skip
VERIFY_FLAGS = ("--sequences", "--tokens", "--tolerance", *_names(VERIFY_GROUPS))
# Settings of the engine that have no use without a server: what has routes, what many clients need.
_SERVED = (
    "engine.profile_dir",
    "engine.cache.session_dir",
    "engine.log_format",
    "engine.scheduler.max_queue",
    "engine.scheduler.queue_timeout",
    "engine.scheduler.policy",
)
# `verify` runs its engine in the process that compares, so nobody watches over its progress.
_WATCHED = ("engine.hang_timeout", "engine.load_timeout", "engine.warm_up_timeout", "engine.seed")
# `plan` takes the command line of `serve` as it is, and counts what its engine would hold.
_UNUSED = (("generate", _SERVED), ("verify", (*_SERVED, *_WATCHED)), ("plan", ()))
DEFAULT_MAX_TOKENS = 128


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    stdin = "the prompt; without one, what stdin holds, but for its last newline"
    parser.add_argument("prompt", nargs="?", help=stdin)
    parser.add_argument("--model", help="folder of a checkpoint [tiny-dsa]")
    parser.add_argument("--file", type=Path, help="a file that holds the prompt")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is what a user says, not a text to go on"
    )
    parser.add_argument("--stop", action="append", help="a text that ends it; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on up to --max-tokens")
    for name, kind in _SAMPLING:
        default = f" [{DEFAULT_MAX_TOKENS}]" if name == "--max-tokens" else ""
        parser.add_argument(name, type=kind, help=f"as in a request{default}")
    add_flags(parser, GENERATE_GROUPS)


def add_verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder of a checkpoint [tiny-dsa]")
    parser.add_argument("--sequences", type=int, default=4, help="texts that are compared [4]")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each text [256]")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="mean distance of logprobs that is taken [0.001 in float32, 0.05 in bfloat16]",
    )
    add_flags(parser, VERIFY_GROUPS)


def check_settings(parsed: argparse.Namespace) -> None:
    """Raise UsageError for a `--set` of what these commands would not obey."""
    for setting in parsed.set:
        path = setting.partition("=")[0]
        if not _is_obeyed(path, parsed.command):
            raise UsageError(f"--set {setting}: {parsed.command} does not use {path}")


def unused_settings(command: str, config: ServerConfig) -> list[str]:
    """Settings that ask for something and that this command does not obey.

    Files, and flags of `plan`, are shared with `serve`, so those are named and not refused. A key
    comes from the environment as well, which is no mistake.
    """
    given, default = (dict(_leaves(dataclasses.asdict(c))) for c in (config, ServerConfig()))
    return [
        path
        for path, value in given.items()
        if value != default[path] and path != "api_key" and not _is_obeyed(path, command)
    ]


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_obeyed(path: str, command: str) -> bool:
    if path == "chat_format":
        return command == "generate"
    return path.startswith("engine.") and path not in dict(_UNUSED)[command]


def run_generate(parsed: argparse.Namespace, config: ServerConfig) -> int:
    """Write the text behind a prompt to stdout. Raises UsageError, StartFailed."""
    from .generate_command import generate  # noqa: PLC0415 - heavy: only this command needs it

    prompt = _prompt(parsed)
    given = {name[2:].replace("-", "_") for name, _ in _SAMPLING}
    fields: dict[str, Any] = {name: vars(parsed)[name] for name in sorted(given)}
    fields |= {"stop": parsed.stop, "ignore_eos": parsed.ignore_eos}
    fields = {name: value for name, value in fields.items() if value is not None}
    fields.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if parsed.chat:
        fields["messages"] = [{"role": "user", "content": prompt}]
    else:
        fields["prompt"] = prompt
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(generate(config, fields, _write))
        _write("\n")
    except ApiError as error:
        raise (UsageError if error.status < 500 else StartFailed)(error.message) from None
    return 0


def _prompt(parsed: argparse.Namespace) -> str:
    if parsed.file is None:
        try:
            # The newline that ends a line is not said to the model.
            is_piped = parsed.prompt is None
            prompt = sys.stdin.read().removesuffix("\n") if is_piped else parsed.prompt
            # Bytes that are no text may have been let through as lone surrogates.
            prompt.encode()
        except UnicodeError as error:
            raise UsageError(f"the prompt is not UTF-8 text: {error}") from None
        return prompt
    if parsed.prompt is not None:
        raise UsageError("give the prompt or --file, and not both")
    try:
        return parsed.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file {parsed.file}: {error}") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def run_verify(parsed: argparse.Namespace, config: ServerConfig) -> int:
    """Compare with transformers; 0 where both agree. Raises UsageError."""
    for name, value in (("--sequences", parsed.sequences), ("--tokens", parsed.tokens - 1)):
        if value < 1:
            raise UsageError(f"{name} is too small; there must be something to compare")
    if parsed.tolerance is not None and not parsed.tolerance > 0:
        raise UsageError(f"--tolerance is {parsed.tolerance}; it must be positive")
    with refusing():
        first = read_settings(Path(config.engine.model)).bos_id or 0
    return verify_checkpoint(
        config.engine, parsed.sequences, parsed.tokens, first, parsed.tolerance
    )
