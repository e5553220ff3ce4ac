"""The cache as the scheduler uses it: admit, grow, publish and release block tables.

Pages that are free, and idle pages of the prefix cache, are equally good to a request that needs
room: free ones are taken first, then the idle ones in the order of their last use.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Protocol

from .block_table import BlockTable
from .pool import PagePool
from .prefix_cache import KeyChain, PrefixCache, root_key

Tokens = Callable[[int, int], Sequence[int]]
"""Ids of the tokens start..stop-1 of a request."""


class Tier(Protocol):
    """Where rows go that must make way: `host_tier.HostTier`. Nothing moves before `settle`."""

    def __len__(self) -> int: ...
    def __contains__(self, key: object) -> bool: ...
    def store(self, page: int, key: bytes) -> None: ...
    def load(self, key: bytes, page: int) -> None: ...
    def forget(self, keys: Sequence[bytes] | None = None) -> None: ...
    def settle(self) -> None: ...


class KvCache:
    """Pages of `page_size` tokens, handed to block tables and found again by their tokens.

    reuses_prefixes: whether rows are ever found again. tier: where evicted rows go, if anywhere.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        reuses_prefixes: bool = True,
        tier: Tier | None = None,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.prefix = PrefixCache()
        self.page_size = page_size
        self.reuses_prefixes = reuses_prefixes
        self.tier = tier
        self.num_evictions = 0  # idle pages that were given up because pages were short
        self.num_loads = 0  # pages whose rows came back from the tier

    @property
    def num_tokens(self) -> int:
        """Tokens that fit when nothing is cached."""
        return self.pool.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that nobody holds."""
        return self.pool.num_free + self.prefix.num_idle

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def new_table(self, salts: Sequence[str] = (), reuse: bool = True) -> BlockTable:
        """An empty table, which shares pages with tables of the same salts alone.

        reuse: False for a table that shares none.
        """
        table = BlockTable(self.page_size)
        if reuse and self.reuses_prefixes:
            table.chain = KeyChain(root_key(*salts), self.page_size)
        return table

    def admit(
        self, table: BlockTable, tokens: Tokens, num_tokens: int, spare: int, reads: bool = True
    ) -> int | None:
        """Fill an empty table with pages for `num_tokens`, those of a cached prefix first.

        The last token is never taken from the cache: the next one is chosen from its logits.
        spare: pages that must stay available. reads: whether cached rows may stand for computed
        ones. Returns how many tokens are cached; None, with nothing taken, if pages are short.
        """
        keys = self._prefix_keys(table, tokens, num_tokens, reads)
        if not self._fill(table, keys, self.pages_for(num_tokens), spare):
            return None
        return table.num_shared * self.page_size

    def has_room(
        self, table: BlockTable, tokens: Tokens, num_tokens: int, spare: int, reads: bool = True
    ) -> bool:
        """Whether `admit` would fill the table now."""
        keys = self._prefix_keys(table, tokens, num_tokens, reads)
        return self._fits(self.prefix.find(keys), self.pages_for(num_tokens), spare)

    def hold(self, table: BlockTable, tokens: Tokens, num_tokens: int) -> int:
        """Fill an empty table with what is cached of `num_tokens`, and with nothing else.

        Returns how many tokens that is; rows of the tier are there after `settle`.
        """
        keys = self._keys(table, tokens, num_tokens // self.page_size)
        count = len(self.prefix.find(keys))
        if self.tier is not None:
            count += sum(1 for _ in takewhile(self.tier.__contains__, keys[count:]))
        if not self._fill(table, keys[:count], count, 0):
            return 0
        return table.num_shared * self.page_size

    def grow(self, table: BlockTable, num_tokens: int, spare: int = 0) -> bool:
        """Make room for `num_tokens` in all and leave `spare` pages available.

        False, with nothing taken, if pages are short.
        """
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing + spare > self.num_available:
            return False
        if missing > 0:
            table.pages.extend(self._take(missing))
        return True

    def publish(self, table: BlockTable, tokens: Tokens, num_computed: int) -> None:
        """Let others find the full pages among the first `num_computed` tokens."""
        full, chain = num_computed // self.page_size, table.chain
        if chain is None or full <= table.num_shared:
            return
        if chain.num_tokens < full * self.page_size:
            chain.extend(tokens(chain.num_tokens, full * self.page_size))
        for i in range(table.num_shared, full):
            self.prefix.publish(table.pages[i], chain.keys[i])
        table.num_shared = full

    def release(self, table: BlockTable) -> None:
        """Give back every page of the table, which is empty afterwards."""
        self.prefix.rest(self.pool.release(table.pages, kept=self.prefix))
        table.pages.clear()
        table.num_shared = 0

    def discard(self, table: BlockTable) -> None:
        """Release a table whose rows nobody must use again."""
        self.prefix.forget(table.pages[: table.num_shared])
        if self.tier is not None and table.chain is not None:
            self.tier.forget(table.chain.keys)
        self.release(table)

    def flush(self) -> None:
        """Forget every cached row; pages that are held stay with their holders."""
        for page in self.prefix.clear():
            self.pool.reclaim(page)
        if self.tier is not None:
            self.tier.forget()

    def settle(self) -> None:
        """Let every row be where the tables say, before the next step is computed."""
        if self.tier is not None:
            self.tier.settle()

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError if a page is lost, held by nobody, or written by one of its holders.

        What a table may still write to belongs to it alone.
        """
        tables = list(tables)
        self.pool.check((table.pages for table in tables), self.prefix.idle)
        self.prefix.check()
        holders = Counter(page for table in tables for page in table.pages)
        own = [page for table in tables for page in table.pages[table.num_shared :]]
        if any(holders[page] > 1 or page in self.prefix for page in own):
            raise RuntimeError("a page that can be written is shared")

    def _keys(self, table: BlockTable, tokens: Tokens, full: int) -> list[bytes]:
        """The keys of the first `full` pages; none for a table that shares nothing."""
        chain = table.chain
        if chain is None:
            return []
        if len(chain.keys) < full:
            chain.extend(tokens(chain.num_tokens, full * self.page_size))
        return chain.keys[:full]

    def _prefix_keys(
        self, table: BlockTable, tokens: Tokens, num_tokens: int, reads: bool
    ) -> list[bytes]:
        """The keys of all pages that may come from the cache: the last token never does."""
        return self._keys(table, tokens, (num_tokens - 1) // self.page_size) if reads else []

    def _fits(self, found: list[int], num_pages: int, spare: int) -> bool:
        """Whether `num_pages`, the cached ones among them, can be had and leave `spare`."""
        missing = num_pages - len(found)
        return missing + spare <= self.num_available - self.prefix.count_idle(found)

    def _fill(self, table: BlockTable, keys: list[bytes], num_pages: int, spare: int) -> bool:
        """Give an empty table `num_pages` pages, those of the cached `keys` first.

        False, with nothing taken, if that would not leave `spare` pages.
        """
        found = self.prefix.find(keys)
        if not self._fits(found, num_pages, spare):
            return False
        self.prefix.wake(found)
        self.pool.share(found)
        table.pages = found + self._take(num_pages - len(found))
        table.num_shared = len(found) + self._load(table, keys, len(found))
        return True

    def _load(self, table: BlockTable, keys: list[bytes], start: int) -> int:
        """Fill the pages of a new table from `start` on with rows of the tier; returns how many."""
        if self.tier is None:
            return 0
        stop = start
        for key in keys[start:]:
            if key not in self.tier:
                break
            self.tier.load(key, table.pages[stop])
            self.prefix.publish(table.pages[stop], key)
            stop += 1
        self.num_loads += stop - start
        return stop - start

    def _take(self, count: int) -> list[int]:
        for _ in range(count - self.pool.num_free):
            page, key = self.prefix.give_up()
            if self.tier is not None:
                self.tier.store(page, key)
            self.pool.reclaim(page)
            self.num_evictions += 1
        return self.pool.take(count)
