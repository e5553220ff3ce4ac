"""Rows that say whose they are: domain, position, and a digest of all tokens up to there.

They stand where a model's rows do, latent and index rows alike, and move as those do. A domain is a
tenant with a salt, or a single request that shares nothing: rows of equal tokens are foreign all
the same where the domain differs. `Canaries.read` shows what a block table leads to, and
`rows_of` what has to be there.
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate

import numpy as np
import torch

from minidsa.kv_cache.block_table import token_slots
from minidsa.kv_cache.host_tier import HostTier
from minidsa.kv_cache.layout import RowLayout
from minidsa.kv_cache.pool import PagePool
from minidsa.kv_cache.storage import CacheStorage

# The second layer shares the selection of another and owns no index rows.
LAYOUT = RowLayout(latent_width=3, index_width=3, index_layers=(True, False))
POISON = -1
_MASK = (1 << 62) - 1


def digest(state: int, token: int) -> int:
    """FNV-1a: the order of the tokens matters, and so does each of them."""
    return ((state ^ (token + 1)) * 0x100000001B3) & _MASK


def digests(tokens: Sequence[int]) -> list[int]:
    """The digest behind each of the tokens."""
    return list(accumulate(tokens, digest, initial=0x4BF29CE484222325))[1:]


class Canaries:
    """Cache memory of `num_pages` pages that can be handed out; all of it unreadable at first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.storage = CacheStorage(
            LAYOUT, num_pages + 1, page_size, torch.int64, torch.device("cpu")
        )
        self._planes = [plane.numpy() for plane in self.storage.planes()]
        for plane in self._planes:
            plane[:] = POISON
        self._domains: dict[Hashable, int] = {}

    def tier(self, num_pages: int) -> HostTier:
        """A real host tier of so many pages beside this memory."""
        return HostTier(self.storage, num_pages * LAYOUT.bytes_per_token(8) * self.page_size)

    def rows_of(self, domain: Hashable, tokens: Sequence[int]) -> np.ndarray:
        """What the tokens of a domain leave, [tokens, 3]."""
        number = self._domains.setdefault(domain, len(self._domains) + 1)
        rows = np.empty((len(tokens), 3), dtype=np.int64)
        rows[:, 0], rows[:, 1] = number, np.arange(len(tokens))
        rows[:, 2] = digests(tokens)
        return rows

    def write(self, pages: Sequence[int], start: int, rows: np.ndarray) -> None:
        """Store rows of tokens from `start` on, in every layer."""
        slots = token_slots(pages, self.page_size, start, start + len(rows))
        for plane in self._planes:
            plane[..., slots, :] = rows

    def check(self, pages: Sequence[int], stop: int, wanted: np.ndarray) -> None:
        """Raise AssertionError unless the first `stop` rows behind a table are as wanted."""
        slots = token_slots(pages, self.page_size, 0, stop)
        for plane in self._planes:
            found = plane[..., slots, :]
            assert (found == wanted[:stop]).all(), (
                f"unwritten or foreign rows: {found.tolist()} instead of {wanted[:stop].tolist()}"
            )

    def poison(self, page: int) -> None:
        rows = slice(page * self.page_size, (page + 1) * self.page_size)
        for plane in self._planes:
            plane[..., rows, :] = POISON


class PoisoningPool(PagePool):
    """A pool that makes the rows of a page unreadable the moment the page is free.

    tier: what is to be kept of a page is copied before.
    """

    def __init__(self, num_pages: int, canaries: Canaries, tier: HostTier | None) -> None:
        super().__init__(num_pages)
        self._canaries = canaries
        self._tier = tier

    def reclaim(self, page: int) -> None:
        super().reclaim(page)
        if self._tier is not None:
            self._tier.settle()
        self._canaries.poison(page)
