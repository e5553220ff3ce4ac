"""The flags of the commands that load a checkpoint and serve nobody: `generate` and `verify`."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from ..configs.server import ServerConfig
from ..scheduler.process import verify_checkpoint
from .engine_client import StartFailed
from .errors import ApiError
from .flag_table import ENGINE_FLAGS, ENGINE_GROUPS
from .flags import UsageError, add_flags
from .generate_command import generate
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
_ENGINE = (*(flag.name for flag in ENGINE_FLAGS), "--config", "--set")
GENERATE_FLAGS = (
    "--model", "--file", "--chat", "--stop", "--ignore-eos", *(name for name, _ in _SAMPLING),
    *_ENGINE,
)  # fmt: skip
VERIFY_FLAGS = ("--sequences", "--tokens", "--tolerance", *_ENGINE)
DEFAULT_MAX_TOKENS = 128
INTERRUPTED = 130


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; without one, what stdin holds")
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
    add_flags(parser, ENGINE_GROUPS)


def add_verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder of a checkpoint [tiny-dsa]")
    parser.add_argument("--sequences", type=int, default=4, help="texts that are compared [4]")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each text [256]")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="mean distance of logprobs that is taken [0.001 in float32, 0.05 in bfloat16]",
    )
    add_flags(parser, ENGINE_GROUPS)


def check_settings(parsed: argparse.Namespace) -> None:
    """Raise UsageError for a setting of the server, which these commands would not obey."""
    for setting in parsed.set:
        if not setting.startswith("engine."):
            raise UsageError(f"--set {setting}: this command has settings of the engine alone")


def run_generate(parsed: argparse.Namespace, config: ServerConfig) -> int:
    """Write the text behind a prompt to stdout. Raises UsageError, StartFailed."""
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
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads has enough; what is still buffered must not fail once more at the exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
    return 0


def _prompt(parsed: argparse.Namespace) -> str:
    if parsed.file is None:
        try:
            prompt = sys.stdin.read() if parsed.prompt is None else parsed.prompt
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
    try:
        first = read_settings(Path(config.engine.model)).bos_id or 0
    except ValueError as error:
        raise StartFailed(str(error)) from None
    return verify_checkpoint(
        config.engine, parsed.sequences, parsed.tokens, first, parsed.tolerance
    )
