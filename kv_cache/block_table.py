"""The pages of one request, in the order of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from .prefix_cache import KeyChain


@dataclass(slots=True)
class BlockTable:
    """Token i of the request lives in page i // page_size at offset i % page_size.

    chain: the keys of its full pages; None for a request that neither uses nor leaves cached rows.
    num_shared: leading pages that others may hold as well, so that nobody writes to them any more.
    """

    page_size: int
    pages: list[int] = field(default_factory=list)
    chain: KeyChain | None = None
    num_shared: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit in the pages held now."""
        return len(self.pages) * self.page_size


def token_slots(pages: Sequence[int], page_size: int, start: int, stop: int) -> list[int]:
    """Cache slots of tokens start..stop-1 of a request; its pages must reach that far."""
    if stop - start == 1:
        return [pages[start // page_size] * page_size + start % page_size]
    first = start // page_size
    rows = [range(p * page_size, (p + 1) * page_size) for p in pages[first : -(-stop // page_size)]]
    return list(chain.from_iterable(rows))[start - first * page_size : stop - first * page_size]
