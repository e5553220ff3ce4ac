"""Who may ask, and how much: API keys with limits of their own.

One key is set by `api_key`; a file (`api_key_file`) names several:

    [alice]
    key = "..."
    requests_per_minute = 60
    requests_at_once = 8
"""

import hmac
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from .errors import rate_limited

_MINUTE = 60.0


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One key of the file; a limit of 0 is none."""

    key: str
    requests_per_minute: int = 0
    requests_at_once: int = 0


class Key:
    """One key and what is left of its limits.

    The rate is a bucket: a minute's requests may come at once, and one comes back each
    60 / requests_per_minute seconds.
    """

    def __init__(self, entry: KeyEntry, clock: Callable[[], float] = time.monotonic) -> None:
        self.digest = digest(entry.key.encode())
        self._entry = entry
        self._clock = clock
        self._left = float(entry.requests_per_minute)
        self._filled = clock()
        self._at_once = 0

    def enter(self) -> None:
        """Count a request that begins; raises ApiError 429 over a limit. `leave` when it ends."""
        entry = self._entry
        if entry.requests_at_once and self._at_once >= entry.requests_at_once:
            raise rate_limited(f"This key may have {entry.requests_at_once} requests at once", 1)
        if entry.requests_per_minute:
            self._refill()
            if self._left < 1:
                wait = (1 - self._left) * _MINUTE / entry.requests_per_minute
                message = f"This key may send {entry.requests_per_minute} requests a minute"
                raise rate_limited(message, math.ceil(wait))
            self._left -= 1
        self._at_once += 1

    def leave(self) -> None:
        self._at_once -= 1

    def _refill(self) -> None:
        now, rate = self._clock(), self._entry.requests_per_minute
        self._left = min(rate, self._left + (now - self._filled) * rate / _MINUTE)
        self._filled = now


def digest(key: bytes) -> bytes:
    """Of equal length whatever was sent, so that comparing tells nothing about a key's length."""
    return sha256(key).digest()


class Keyring:
    """All keys of a server."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def find(self, headers: Mapping[bytes, bytes]) -> Key | None:
        """The key of a request, from either header that clients use; None where none fits."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = digest(token if scheme == b"Bearer" else headers.get(b"x-api-key", b""))
        found = None
        # Every key is compared, so the time does not tell which one was close or fits.
        for key in self._keys:
            if hmac.compare_digest(given, key.digest):
                found = key
        return found


def read_keyring(api_key: str | None, file: str | None) -> Keyring | None:
    """The keys of the settings; None where none is asked for.

    Raises ValueError, in one line that names the file and the entry, for a file that cannot be
    used.
    """
    entries = [] if api_key is None else [KeyEntry(api_key)]
    if file is not None:
        entries += _read_file(Path(file))
    return Keyring([Key(entry) for entry in entries]) if entries else None


def _read_file(path: Path) -> list[KeyEntry]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        named = msgspec.convert(tree, dict[str, KeyEntry])
    except OSError as error:
        raise ValueError(f"api_key_file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"api_key_file {path}: {error}") from None
    if not named:
        raise ValueError(f"api_key_file {path}: it names no key, so it would guard nothing")
    for name, entry in named.items():
        if not entry.key.strip():
            raise ValueError(f"api_key_file {path}: the key of {name} is empty")
        if entry.key != entry.key.strip():
            raise ValueError(
                f"api_key_file {path}: the key of {name} begins or ends with a space, which a "
                "header loses on its way"
            )
        if min(entry.requests_per_minute, entry.requests_at_once) < 0:
            raise ValueError(f"api_key_file {path}: a limit of {name} is negative")
    if len({entry.key for entry in named.values()}) < len(named):
        raise ValueError(f"api_key_file {path}: two names have one key")
    return list(named.values())
