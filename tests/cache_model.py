"""What the prefix cache and the host tier have to do, in terms of tokens instead of keys and ids.

A prefix is a domain with all tokens up to the end of a full page. The model knows for each of them
whether the device or the host holds it, who is idle for how long, and nothing of hashes or memory.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Prefix = tuple[Hashable, tuple[int, ...]]


@dataclass(eq=False)
class ModelPage:
    """A page: how many tables hold it, and the prefix by which it is found, if any."""

    holders: int = 1
    prefix: Prefix | None = None


@dataclass(eq=False)
class ModelTable:
    """Tokens of a request, and the pages that hold their rows; domain None shares nothing.

    known: the prefixes that were looked for or published, which a failure makes suspect.
    """

    domain: Hashable
    tokens: list[int]
    pages: list[ModelPage] = field(default_factory=list)
    num_shared: int = 0
    known: set[Prefix] = field(default_factory=set)


class CacheModel:
    """`num_pages` pages on the device, room for `num_host` (None: no tier) on the host."""

    def __init__(self, num_pages: int, page_size: int, num_host: int | None) -> None:
        self.page_size, self.num_host = page_size, num_host
        self.num_free = num_pages
        self.device: dict[Prefix, ModelPage] = {}
        self.idle: OrderedDict[ModelPage, None] = OrderedDict()
        self.host: OrderedDict[Prefix, None] = OrderedDict()
        self.num_evictions = self.num_loads = 0

    def prefixes(self, table: ModelTable, num_tokens: int) -> list[Prefix]:
        """Those of the full pages among so many tokens."""
        if table.domain is None:
            return []
        ends = range(self.page_size, num_tokens + 1, self.page_size)
        return [(table.domain, tuple(table.tokens[:end])) for end in ends]

    def admit(self, table: ModelTable, spare: int, reads: bool) -> int | None:
        """How many tokens are cached; None if pages are short."""
        wanted = self.prefixes(table, len(table.tokens) - 1) if reads else []
        table.known |= set(wanted)
        return self._fill(table, wanted, -(-len(table.tokens) // self.page_size), spare)

    def hold(self, table: ModelTable) -> int:
        """Pages for what is cached of the table's tokens, and no others; how many tokens."""
        wanted = self.prefixes(table, len(table.tokens))
        table.known |= set(wanted)
        count = 0
        for place in (self.device, self.host):
            while count < len(wanted) and wanted[count] in place:
                count += 1
        return self._fill(table, wanted[:count], count, 0) or 0

    def _fill(
        self, table: ModelTable, wanted: list[Prefix], num_pages: int, spare: int
    ) -> int | None:
        found = []
        for prefix in wanted:
            if prefix not in self.device:
                break
            found.append(self.device[prefix])
        missing = num_pages - len(found)
        idle = len(self.idle) - sum(page in self.idle for page in found)
        if missing + spare > self.num_free + idle:
            return None
        for page in found:
            self.idle.pop(page, None)
            page.holders += 1
        table.pages = found + self._take(missing)
        table.num_shared = len(found)
        for prefix in wanted[len(found) :]:
            if prefix not in self.host:
                break
            self.host.move_to_end(prefix)
            self._show(table.pages[table.num_shared], prefix)
            table.num_shared += 1
        self.num_loads += table.num_shared - len(found)
        return table.num_shared * self.page_size

    def grow(self, table: ModelTable, num_tokens: int, spare: int) -> bool:
        missing = -(-num_tokens // self.page_size) - len(table.pages)
        if missing + spare > self.num_free + len(self.idle):
            return False
        table.pages += self._take(max(0, missing))
        return True

    def publish(self, table: ModelTable, num_computed: int) -> None:
        prefixes = self.prefixes(table, num_computed)
        table.known |= set(prefixes)
        for i in range(table.num_shared, len(prefixes)):
            self._show(table.pages[i], prefixes[i])
        table.num_shared = max(table.num_shared, len(prefixes))

    def release(self, table: ModelTable) -> None:
        for page in reversed(table.pages):
            page.holders -= 1
            if not page.holders and page.prefix is not None:
                self.idle[page] = None
            elif not page.holders:
                self.num_free += 1
        table.pages, table.num_shared = [], 0

    def discard(self, table: ModelTable) -> None:
        for page in table.pages[: table.num_shared]:
            self._hide(page)
        for prefix in table.known:
            self.host.pop(prefix, None)
        self.release(table)

    def flush(self) -> None:
        for page in list(self.device.values()):
            self._hide(page)
        self.num_free += len(self.idle)
        self.idle.clear()
        self.host.clear()

    def _show(self, page: ModelPage, prefix: Prefix) -> None:
        if prefix not in self.device and page.prefix is None:
            self.device[prefix] = page
            page.prefix = prefix

    def _hide(self, page: ModelPage) -> None:
        if page.prefix is not None:
            del self.device[page.prefix]
            page.prefix = None

    def _take(self, count: int) -> list[ModelPage]:
        for _ in range(count - self.num_free):
            page, _ = self.idle.popitem(last=False)
            self._store(page.prefix)
            self._hide(page)
            self.num_free += 1
            self.num_evictions += 1
        self.num_free -= count
        return [ModelPage() for _ in range(count)]

    def _store(self, prefix: Prefix | None) -> None:
        if self.num_host is None or prefix is None:
            return
        if prefix not in self.host and len(self.host) == self.num_host:
            self.host.popitem(last=False)
        self.host[prefix] = None
        self.host.move_to_end(prefix)


def stem(kind: int, length: int) -> Sequence[int]:
    """Tokens of a prompt of one of a few kinds: equal kinds share their beginnings."""
    return [(kind * 37 + i * 11) % 500 for i in range(length)]
