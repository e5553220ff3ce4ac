"""Settings from the command line and from a file: flags, then the file, then the defaults.

A dozen settings have a flag of their own, named as in vLLM where they mean the same. Every other
one is reached by its path: `--set engine.cache.page_size=16`, or the same key in a TOML file.
"""

import argparse
import dataclasses
import difflib
import os
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec

from ..configs.gpus import GPUS
from ..configs.server import ServerConfig
from .flag_table import FLAGS, GROUPS, KEY_VARIABLE, Group

NEAR = 0.75  # how alike two names are that may be one with a slip, from 0 to 1

TYPE_WORDS = (
    ("int", "a whole number"),
    ("float", "a number"),
    ("str", "a text"),
    ("bool", "true or false"),
)


class UsageError(Exception):
    """A wrong flag, key or value; the text is one line that says which."""


PLAN_FLAGS = ("--gpu", "--tp")
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


def add_flags(parser: argparse.ArgumentParser, groups: Sequence[Group] = GROUPS) -> None:
    """The flags of `serve`, in groups, each with its values and its default."""
    for title, flags in groups:
        group = parser.add_argument_group(title)
        for flag in flags:
            kind, default = _setting(flag.target)
            if kind is bool:
                # A switch: what follows it may be the checkpoint.
                group.add_argument(
                    flag.name, action="store_const", const="true", dest=flag.target, help=flag.help
                )
                continue
            group.add_argument(
                flag.name,
                action=_Once,
                dest=flag.target,
                metavar=_metavar(flag.target),
                help=f"{flag.help} [{flag.unset if default is None else default}]",
            )
    others = parser.add_argument_group("every other setting")
    others.add_argument(
        "--config", action=_Once, metavar="FILE.toml", help="settings from a TOML file"
    )
    others.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a setting by its path, such as engine.cache.page_size=16; may be repeated",
    )


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `plan` has beside those of `serve`."""
    group = parser.add_argument_group("the machine that is planned for")
    names = ", ".join(gpu.name for gpu in GPUS)
    group.add_argument(
        "--gpu", action=_Once, metavar="NAME", help=f"{names} [the main memory of this machine]"
    )
    group.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="devices that would share the model by tensor parallelism, which only plans know [1]",
    )


def _setting(path: str) -> tuple[Any, Any]:
    """Type and default of a setting."""
    kind: Any = ServerConfig
    default: Any = ServerConfig()
    for name in path.split("."):
        kind, default = typing.get_type_hints(kind)[name], vars(default)[name]
    return kind, default


def choices_of(path: str) -> tuple[str, ...]:
    """The values of a setting that takes one of a few words; empty for any other."""
    kind, _ = _setting(path)
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _metavar(path: str) -> str:
    kind, _ = _setting(path)
    if choices := choices_of(path):
        return "{" + ",".join(choices) + "}"
    return "N" if kind in (int, int | None) else "SECONDS" if kind is float else "TEXT"


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
    names: dict[str, str] = {}
    for flag in FLAGS:
        if given.get(flag.target) is not None:
            _put(tree, flag.target, given[flag.target])
            names[flag.target] = flag.name
    if arguments.model is not None:
        _put(tree, "engine.model", arguments.model)
    _check_keys(tree, ServerConfig, "")
    return _checked(_convert(tree, strict=False, names=names))


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
        elif isinstance(value, Mapping):
            raise UsageError(f"{path} is a value, not a section")


def _paths(kind: type, prefix: str) -> list[str]:
    paths = []
    for name, section in typing.get_type_hints(kind).items():
        paths.append(prefix + name)
        if dataclasses.is_dataclass(section) and isinstance(section, type):
            paths += _paths(section, f"{prefix}{name}.")
    return paths


def _nearest(name: str, known: Sequence[str]) -> str:
    """A hint for a name that is misspelled, judged by its last part; nothing for a strange one."""
    by_last = {_last_part(path): path for path in known}
    close = difflib.get_close_matches(_last_part(name), by_last, 1, NEAR)
    return f"; did you mean {by_last[close[0]]}?" if close else ""


def _last_part(name: str) -> str:
    return name.removeprefix("--").rpartition(".")[2].replace("-", "_")


def _convert(
    tree: Mapping[str, Any], strict: bool, names: Mapping[str, str] = MappingProxyType({})
) -> ServerConfig:
    """names: by their paths, the flags that settings were given by."""
    try:
        return msgspec.convert(tree, ServerConfig, strict=strict)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        raise UsageError(_wrong_value(tree, path, names.get(path, path), text)) from None


def _wrong_value(tree: Mapping[str, Any], path: str, name: str, text: str) -> str:
    """One line for a value of the wrong type or none of the allowed ones; name: what to call it."""
    value: Any = tree
    for key in path.split("."):
        value = value[key]
    if choices := choices_of(path):
        return f"{name} is {value!r}; it must be one of {', '.join(choices)}"
    words = dict(TYPE_WORDS)
    kinds = text.removeprefix("Expected `").partition("`, got")[0].split(" | ")
    expected = " or ".join(words.get(kind, kind) for kind in kinds if kind != "null")
    return f"{name} is {value!r}; it must be {expected}"


def _checked(config: ServerConfig) -> ServerConfig:
    """Raise UsageError for values out of range."""
    if config.api_key is not None and not config.api_key.strip():
        raise UsageError("api_key is empty, so it would guard nothing; leave it out or set one")
    if not 0 <= config.port <= 65535:
        raise UsageError(f"port is {config.port}; it must be from 0 to 65535")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", config.metrics_prefix):
        raise UsageError(
            f"metrics_prefix is {config.metrics_prefix!r}; it must be letters, digits and _, and "
            "not begin with a digit"
        )
    limits = dataclasses.asdict(config.limits)
    stored = limits.pop("max_stored_bytes")
    if stored < 0:
        raise UsageError(f"limits.max_stored_bytes is {stored}; it must not be negative")
    positive = {"heartbeat_seconds": config.heartbeat_seconds} | {
        f"limits.{name}": value for name, value in limits.items()
    }
    for name, value in positive.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"{name} is {value}; it must be positive")
    if not 0 <= config.drain_seconds < float("inf"):
        raise UsageError(f"drain_seconds is {config.drain_seconds}; it must not be negative")
    if not 0 <= config.sse_keep_alive_interval < float("inf"):
        interval = config.sse_keep_alive_interval
        raise UsageError(f"sse_keep_alive_interval is {interval}; it must not be negative")
    return config
