"""Who proposes the tokens that the next step verifies.

A proposal costs nothing but time: whatever is proposed, the tokens of a request are those that the
model draws without proposals.
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from .request import Request

LONGEST_NGRAM = 4
SHORTEST_NGRAM = 2


class Drafter(Protocol):
    """Guesses how a decoding request goes on."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """At most `most` tokens that may follow the newest one; none if there is no guess."""
        ...


class ModelDrafter:
    """Hands on what the model's own MTP layer guessed in the step before."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return request.draft_ids[:most]


class NgramDrafter:
    """Prompt lookup: what followed the last tokens when they stood in the request before.

    Good for answers that repeat their prompt, such as edits and summaries; needs no model.
    """

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Request, _NgramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, most: int) -> Sequence[int]:
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = _NgramIndex()
        start = index.find(request)
        return [] if start is None else request.tokens(start, min(start + most, request.num_tokens))


class _NgramIndex:
    """Where each n-gram of a request was last followed by something; grows with the request."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def find(self, request: Request) -> int | None:
        """Position behind the latest earlier place of the longest suffix; None without any."""
        total = request.num_tokens
        first = max(0, self._num_indexed - LONGEST_NGRAM)
        recent = request.tokens(first, total)
        for stop in range(self._num_indexed, total):
            for size in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, stop) + 1):
                gram = tuple(recent[stop - size - first : stop - first])
                self._next[gram] = stop
        self._num_indexed = total
        suffix = tuple(request.tokens(max(0, total - LONGEST_NGRAM), total))
        for size in range(min(LONGEST_NGRAM, len(suffix)), SHORTEST_NGRAM - 1, -1):
            if (found := self._next.get(suffix[-size:])) is not None:
                return found
        return None
