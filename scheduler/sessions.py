"""Saves cached prefixes to files and brings them back: between steps, beside what is running.

A session belongs to those who may share its rows, a tenant with a salt: others find neither its
file nor its rows. Only full pages are saved, since only those are ever found again.
"""

from typing import TYPE_CHECKING, Protocol

from ..kv_cache.block_table import BlockTable
from ..kv_cache.cache import KvCache
from ..kv_cache.prefix_cache import root_key
from ..kv_cache.session_error import SessionError
from .messages import Answer, RestoreSession, SaveSession

if TYPE_CHECKING:
    # Its module needs torch, which the scheduler runs without.
    from ..kv_cache.session_file import Session

OWNER_CHARACTERS = 32


class Files(Protocol):
    """Where sessions are: `kv_cache.session_file.SessionFiles`. All of it raises SessionError."""

    def write(self, owner: str, name: str, token_ids: list[int], pages: list[int]) -> None: ...
    def read(self, owner: str, name: str) -> "Session": ...
    def place(self, session: "Session", pages: list[int]) -> None: ...


class Sessions:
    """Answers the two commands over a cache and its files; None where no folder is configured."""

    def __init__(self, cache: KvCache, files: Files | None) -> None:
        self._cache = cache
        self._files = files

    def answer(self, command: SaveSession | RestoreSession) -> Answer:
        """What became of a command; a failure leaves the cache as it was."""
        if self._files is None:
            return Answer(False, error="this server has no folder for sessions: set --session-dir")
        owner = _owner(command.tenant, command.cache_salt)
        table = self._cache.new_table((command.tenant, command.cache_salt))
        try:
            if isinstance(command, SaveSession):
                num_tokens = self._save(command, table, owner, self._files)
            else:
                num_tokens = self._restore(command.name, table, owner, self._files)
        except SessionError as error:
            return Answer(False, error=str(error))
        finally:
            self._cache.release(table)
        return Answer(True, num_tokens)

    def _save(self, command: SaveSession, table: BlockTable, owner: str, files: Files) -> int:
        ids = command.token_ids
        num_cached = self._cache.hold(table, lambda start, stop: ids[start:stop], len(ids))
        if not num_cached:
            raise SessionError(
                f"nothing of the {len(ids)} tokens of session {command.name} is cached in a full "
                f"page of {self._cache.page_size}: generate from them first"
            )
        self._cache.settle()
        files.write(owner, command.name, ids[:num_cached], table.pages)
        return num_cached

    def _restore(self, name: str, table: BlockTable, owner: str, files: Files) -> int:
        session = files.read(owner, name)
        ids = session.token_ids
        if not self._cache.grow(table, len(ids)):
            raise SessionError(
                f"session {name} needs {self._cache.pages_for(len(ids))} pages; "
                f"{self._cache.num_available} are available now"
            )
        # What the pages held before may be on its way to the host.
        self._cache.settle()
        files.place(session, table.pages)
        self._cache.publish(table, lambda start, stop: ids[start:stop], len(ids))
        return table.num_shared * self._cache.page_size


def _owner(tenant: str, cache_salt: str) -> str:
    """The folder of those who share rows; nothing of a key or a salt can be read from it."""
    if not tenant and not cache_salt:
        return ""
    return root_key(tenant, cache_salt).hex()[:OWNER_CHARACTERS]
