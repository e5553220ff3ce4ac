"""Pages and who holds them: a free list with reference counts, no tensors.

A page is free, held by one or more tables, or resting: held by nobody, but kept because its rows
may be wanted again. Page 0 is reserved for padding and never handed out. The page that was freed
last is handed out first: its memory is warm, and a pool much larger than its load touches only what
it needs.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

_FREE = -1


class PagePool:
    """`num_pages` pages that can be handed out, numbered from 1."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._references = [_FREE] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages with one reference each; raises ValueError if too few are free."""
        rest = len(self._free) - count
        if not 0 <= rest <= len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        pages = self._free[rest:][::-1]
        del self._free[rest:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that somebody holds or that rest."""
        for page in pages:
            if self._references[page] == _FREE:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int], kept: Container[int] = ()) -> list[int]:
        """Drop one reference of each page, the last page first.

        Of those without any left, the `kept` ones rest and are returned; the others become free.
        Raises ValueError, with the books broken, if a page had none: the engine cannot go on.
        """
        resting = []
        for page in reversed(pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} released more often than it was taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in kept:
                    resting.append(page)
                else:
                    self.reclaim(page)
        return resting

    def reclaim(self, page: int) -> None:
        """Free a page that nobody holds."""
        if self._references[page] != 0:
            raise ValueError(f"page {page} does not rest and cannot be reclaimed")
        self._references[page] = _FREE
        self._free.append(page)

    def check(self, tables: Iterable[Sequence[int]], resting: Iterable[int] = ()) -> None:
        """Raise RuntimeError unless counts equal the holders in `tables` and no page is lost."""
        held = Counter(page for table in tables for page in table)
        pages = range(1, self.num_pages + 1)
        wrong = [page for page in pages if held[page] != max(self._references[page], 0)]
        if wrong or held[0] or self._references[0] != _FREE:
            raise RuntimeError(f"reference counts differ from the holders of pages {wrong[:8]}")
        if len(set(self._free)) != len(self._free):
            raise RuntimeError("a page stands twice in the free list")
        if set(self._free) != {page for page in pages if self._references[page] == _FREE}:
            raise RuntimeError("the free list differs from the pages that count as free")
        if set(resting) != {page for page in pages if self._references[page] == 0}:
            raise RuntimeError("the idle pages differ from the pages without references")
