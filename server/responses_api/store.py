"""Responses kept for `previous_response_id` and for reading them again: in memory, and bounded."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stored:
    """A response as it was sent, and the chat that goes on from it.

    `messages` are those of the whole conversation, shared with the responses before; `size` bounds
    the bytes of all of them.
    """

    body: bytes
    messages: Sequence[dict[str, Any]]
    input_items: Sequence[dict[str, Any]]
    size: int


class ResponseStore:
    """The responses used last, as many as fit into `limit` bytes.

    A response is found by its owner only: the digest of the key that asked for it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stored: OrderedDict[tuple[bytes, str], Stored] = OrderedDict()
        self._size = 0

    @property
    def is_on(self) -> bool:
        return self._limit > 0

    def put(self, owner: bytes, response_id: str, stored: Stored) -> None:
        """Keep a response; the ones not used for longest make room."""
        self.delete(owner, response_id)
        self._stored[owner, response_id] = stored
        self._size += stored.size
        while self._size > self._limit:
            _, oldest = self._stored.popitem(last=False)
            self._size -= oldest.size

    def get(self, owner: bytes, response_id: str) -> Stored | None:
        found = self._stored.get((owner, response_id))
        if found is not None:
            self._stored.move_to_end((owner, response_id))
        return found

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Forget a response; returns whether it was there."""
        found = self._stored.pop((owner, response_id), None)
        if found is not None:
            self._size -= found.size
        return found is not None
