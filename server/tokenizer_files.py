"""The JSON files beside tokenizer.json that say which tokens begin and end a text."""

from pathlib import Path
from typing import Any

import msgspec


class TokenizerSettings(msgspec.Struct, frozen=True):
    """Tokens by literal where tokenizer_config.json names them, by id where the configs do.

    `chat_templates` maps names to Jinja sources; a lone template is called "default".
    """

    bos_token: str | None = None
    eos_token: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_templates: dict[str, str] = {}


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def read_settings(folder: Path) -> TokenizerSettings:
    """Read what is there of tokenizer_config, generation_config and config; none is required.

    generation_config.json wins over config.json. Raises ValueError naming an unreadable file.
    """
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    tokenizer, generation, model = (_read_optional(folder / name) for name in names)
    bos_ids = _ids(generation.get("bos_token_id")) or _ids(model.get("bos_token_id"))
    return TokenizerSettings(
        bos_token=_literal(tokenizer.get("bos_token")),
        eos_token=_literal(tokenizer.get("eos_token")),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(model.get("eos_token_id")),
        chat_templates=_templates(folder, tokenizer.get("chat_template")),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ValueError naming the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent}: no such folder") from None
        raise ValueError(f"{path.name}: no such file in the checkpoint folder") from None
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: not readable as a JSON object ({error})") from error


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _literal(entry: object) -> str | None:
    """A token is stored as its text or as a table with a `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _ids(entry: object) -> tuple[int, ...]:
    entries = entry if isinstance(entry, list) else [entry]
    return tuple(i for i in entries if isinstance(i, int) and not isinstance(i, bool))


def _templates(folder: Path, entry: object) -> dict[str, str]:
    """chat_template.jinja, else the string or the list of named strings of the config."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name}: not readable as text ({error})") from error
    if isinstance(entry, str):
        return {"default": entry}
    if entry is None:
        return {}
    try:
        named = msgspec.convert(entry, list[_NamedTemplate])
    except msgspec.ValidationError as error:
        raise ValueError(
            f"tokenizer_config.json: chat_template is no text and no list of named ones ({error})"
        ) from error
    return {template.name: template.template for template in named}
