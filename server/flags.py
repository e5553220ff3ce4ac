"""Settings from the command line and from a file: flags, then the file, then the defaults.

A dozen settings have a flag of their own, named as in vLLM where they mean the same. Every other
one is reached by its path: `--set engine.cache.page_size=16`, or the same key in a TOML file.
"""

import argparse
import dataclasses
import difflib
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec

from ..configs.server import ServerConfig

KEY_VARIABLE = "MINIDSA_API_KEY"


class UsageError(Exception):
    """A wrong flag, key or value; the text is one line that says which."""


@dataclass(frozen=True)
class Flag:
    """A named flag and the setting it writes."""

    name: str
    target: str
    help: str


FLAGS = (
    Flag("--host", "host", "address to listen on"),
    Flag("--port", "port", "port to listen on; 0 takes any free one"),
    Flag("--served-model-name", "served_model_name", "name of the model in requests and answers"),
    Flag("--api-key", "api_key", f"key that requests must carry; also {KEY_VARIABLE}"),
    Flag("--max-model-len", "engine.max_model_len", "longest prompt plus output, in tokens"),
    Flag("--max-num-seqs", "engine.scheduler.max_num_seqs", "requests that run at once"),
    Flag(
        "--max-num-batched-tokens",
        "engine.scheduler.max_num_batched_tokens",
        "tokens computed in one step",
    ),
    Flag("--dtype", "engine.dtype", "auto, float32, bfloat16 or float16"),
    Flag("--device", "engine.device", "auto, cpu or cuda"),
    Flag("--attention-backend", "engine.attention_backend", "attention backend by name"),
    Flag("--num-threads", "engine.num_threads", "CPU threads of one operation"),
    Flag("--speculative", "engine.speculative.method", "who drafts: auto, none, mtp or ngram"),
    Flag(
        "--num-speculative-tokens",
        "engine.speculative.num_tokens",
        "drafts of a request in one step, at most",
    ),
    Flag("--seed", "engine.seed", "where seeds of requests without one are drawn from"),
    Flag("--drain-seconds", "drain_seconds", "time for open requests to finish at the end"),
)
SERVE_FLAGS = (*(flag.name for flag in FLAGS), "--config", "--set")


class _Once(argparse.Action):
    """Stores a value; a flag given twice is a mistake, not a correction."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if vars(namespace)[self.dest] is not None:
            raise UsageError(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


class OneLineParser(argparse.ArgumentParser):
    """Reports mistakes as UsageError instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`."""
    for flag in FLAGS:
        parser.add_argument(
            flag.name, action=_Once, dest=flag.target, metavar="VALUE", help=flag.help
        )
    parser.add_argument(
        "--config", action=_Once, metavar="FILE.toml", help="settings from a TOML file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="any other setting by its path",
    )


def refuse_unknown(unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError for what the parser did not know, with the nearest name."""
    if unknown:
        name = unknown[0].partition("=")[0]
        kind = "flag" if name.startswith("-") else "argument"
        raise UsageError(f"unknown {kind} {name}{_nearest(name, known)}")


def read_settings(
    arguments: argparse.Namespace, environment: Mapping[str, str] = MappingProxyType(os.environ)
) -> ServerConfig:
    """The settings that flags, environment and file make together; raises UsageError.

    `arguments.model`, where given, is the checkpoint.
    """
    tree: dict[str, Any] = {}
    if arguments.config is not None:
        tree = _read_file(Path(arguments.config))
        _check_keys(tree, ServerConfig, "")
        _convert(tree, strict=True)
    if environment.get(KEY_VARIABLE) is not None:
        tree["api_key"] = environment[KEY_VARIABLE]
    for setting in arguments.set:
        path, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: write it as SECTION.FIELD=VALUE")
        _put(tree, path, value)
    given = vars(arguments)
    for flag in FLAGS:
        if given[flag.target] is not None:
            _put(tree, flag.target, given[flag.target])
    if arguments.model is not None:
        _put(tree, "engine.model", arguments.model)
    _check_keys(tree, ServerConfig, "")
    return _checked(_convert(tree, strict=False))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: {error}") from None


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    node = tree
    for section in sections:
        inner = node.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{path}: {section} is a value, not a section")
        node = inner
    node[name] = value


def _check_keys(tree: Mapping[str, Any], kind: type, prefix: str) -> None:
    """Raise UsageError for the first key that is no setting."""
    types = typing.get_type_hints(kind)
    for key, value in tree.items():
        path = prefix + key
        if key not in types:
            raise UsageError(f"unknown setting {path}{_nearest(path, _paths(ServerConfig, ''))}")
        section = types[key]
        if dataclasses.is_dataclass(section) and isinstance(section, type):
            if not isinstance(value, Mapping):
                raise UsageError(f"{path} is a section, not a value")
            _check_keys(value, section, f"{path}.")


def _paths(kind: type, prefix: str) -> list[str]:
    paths = []
    for name, section in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(section) and isinstance(section, type):
            paths += _paths(section, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def _nearest(name: str, known: Sequence[str]) -> str:
    by_last = {path.rpartition(".")[2]: path for path in known}
    close = difflib.get_close_matches(name, known, 1) or [
        by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], by_last, 1)
    ]
    return f"; did you mean {close[0]}?" if close else ""


def _convert(tree: Mapping[str, Any], strict: bool) -> ServerConfig:
    try:
        return msgspec.convert(tree, ServerConfig, strict=strict)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise UsageError(f"{path.rstrip('`') or 'settings'}: {text}") from None


def _checked(config: ServerConfig) -> ServerConfig:
    """Raise UsageError for values out of range."""
    if config.api_key is not None and not config.api_key.strip():
        raise UsageError("api_key is empty, so it would guard nothing; leave it out or set one")
    if not 0 <= config.port <= 65535:
        raise UsageError(f"port is {config.port}; it must be from 0 to 65535")
    limits = dataclasses.asdict(config.limits)
    positive = {"heartbeat_seconds": config.heartbeat_seconds} | {
        f"limits.{name}": value for name, value in limits.items()
    }
    for name, value in positive.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"{name} is {value}; it must be positive")
    if not 0 <= config.drain_seconds < float("inf"):
        raise UsageError(f"drain_seconds is {config.drain_seconds}; it must not be negative")
    return config
