"""Rows of a known prefix in a file, so that they outlive the engine: a session.

One safetensors file holds the token ids and, for every plane of the cache, the rows of those
tokens. Its metadata says which model computed them and how a row is laid out; rows of anything else
would be read as numbers that mean nothing, so such a file is refused. Pages do not matter: a
session may be read by an engine with another page size.
"""

import contextlib
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .block_table import token_slots
from .session_error import SessionError
from .storage import CacheStorage

VERSION = "minidsa session 1"
SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Session(NamedTuple):
    """Tokens, and their rows in host memory: one tensor [..., tokens, width] for each plane."""

    token_ids: list[int]
    rows: list[torch.Tensor]


class SessionFiles:
    """Sessions in a folder, each owner's in one of its own, and the rows they hold.

    model: what `fingerprint` says of the checkpoint.
    """

    def __init__(self, directory: Path, storage: CacheStorage, model: str) -> None:
        self._directory = directory
        self._storage = storage
        planes = [(str(p.dtype), list(p.shape[:-2]), p.shape[-1]) for p in storage.planes()]
        self._metadata = {"version": VERSION, "model": model, "layout": str(planes)}

    def write(self, owner: str, name: str, token_ids: list[int], pages: list[int]) -> None:
        """Save the rows of these tokens, which stand in `pages`; replaces a session of the name.

        Raises SessionError where the file cannot be written.
        """
        slots = self._slots(pages, len(token_ids))
        tensors = {
            f"rows.{i}": plane.index_select(-2, slots).cpu().contiguous()
            for i, plane in enumerate(self._storage.planes())
        }
        tensors["token_ids"] = torch.tensor(token_ids, dtype=torch.int64)
        path = self._path(owner, name)
        # A reader never sees half a file, and a failed write leaves the old one.
        partial = path.with_name(f"{name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial, self._metadata | {"sha256": _digest(tensors)})
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise SessionError(f"session {name} could not be written: {error}") from error

    def read(self, owner: str, name: str) -> Session:
        """A session as it was written; SessionError if there is none or it cannot be used."""
        names = [*(f"rows.{i}" for i in range(len(self._storage.planes()))), "token_ids"]
        try:
            with self._open(owner, name) as opened:
                metadata = opened.metadata() or {}
                self._verify(name, metadata)
                tensors = {each: opened.get_tensor(each) for each in names}
        except SessionError:
            raise
        except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
            # Whatever a file holds, reading it must not end the engine.
            raise SessionError(f"session {name} is damaged: {error}") from error
        ids = tensors.pop("token_ids")
        if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
            raise SessionError(f"session {name} is damaged: its token ids are no list")
        self._verify_rows(name, list(tensors.values()), len(ids))
        if _digest(tensors | {"token_ids": ids}) != metadata.get("sha256"):
            raise SessionError(f"session {name} is damaged: its content is not what was written")
        return Session(ids.tolist(), list(tensors.values()))

    def place(self, session: Session, pages: list[int]) -> None:
        """Write the rows of a session to the slots of `pages`."""
        for rows, plane in zip(session.rows, self._storage.planes(), strict=True):
            slots = self._slots(pages, rows.shape[-2])
            plane.index_copy_(-2 % plane.dim(), slots, rows.to(plane.device))

    def _slots(self, pages: list[int], num_tokens: int) -> torch.Tensor:
        slots = token_slots(pages, self._storage.page_size, 0, num_tokens)
        return torch.tensor(slots, device=self._storage.planes()[0].device)

    def _path(self, owner: str, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise SessionError(
                f"{name[:80]!a} is no name of a session: 1 to 64 letters, digits, dots, dashes and "
                "underscores, a letter or digit first"
            )
        return self._directory / owner / f"{name}{SUFFIX}"

    def _open(self, owner: str, name: str) -> safe_open:
        path = self._path(owner, name)
        if not path.is_file():
            raise SessionError(f"there is no session {name}")
        return safe_open(path, framework="pt")

    def _verify(self, name: str, found: dict[str, str]) -> None:
        for field, why in (
            ("version", "it was written by another version"),
            ("model", "it was computed by another model"),
            ("layout", "its rows are laid out in another way"),
        ):
            if found.get(field) != self._metadata[field]:
                raise SessionError(
                    f"session {name} cannot be used, {why}: its {field} is "
                    f"{found.get(field, 'missing')[:200]}, here it is {self._metadata[field]}"
                )

    def _verify_rows(self, name: str, rows: list[torch.Tensor], num_tokens: int) -> None:
        for i, (found, plane) in enumerate(zip(rows, self._storage.planes(), strict=True)):
            shape = [*plane.shape[:-2], num_tokens, plane.shape[-1]]
            if list(found.shape) != shape or found.dtype != plane.dtype:
                raise SessionError(f"session {name} is damaged: rows.{i} is not {shape}")


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(checkpoint: Path) -> str:
    """What tells a checkpoint from every other: config.json, sizes, and samples of its weights.

    A fine-tuned model differs from its base in nearly every weight, so samples spread over the
    files tell them apart without reading hundreds of gigabytes.
    """
    digest = sha256((checkpoint / "config.json").read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
