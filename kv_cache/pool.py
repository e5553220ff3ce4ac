"""Pages and who holds them: a free list with reference counts, no tensors.

Page 0 is reserved for padding and never handed out. The page that was freed last is handed out
first: its memory is warm, and a pool much larger than its load touches only what it needs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class PagePool:
    """`num_pages` pages that can be handed out, numbered from 1."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._references = [0] * (num_pages + 1)

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

    def share(self, page: int) -> None:
        """Add a reference to a page that somebody holds."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is free and cannot be shared")
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; those without any left become free.

        Raises ValueError, with the books broken, if a page had none: the engine cannot go on.
        """
        for page in reversed(pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} released more often than it was taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless counts equal the holders in `tables` and no page is lost."""
        held = Counter(page for table in tables for page in table)
        wrong = [p for p in range(1, self.num_pages + 1) if held[p] != self._references[p]]
        if wrong or held[0] or self._references[0]:
            raise RuntimeError(f"reference counts differ from the holders of pages {wrong[:8]}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a page stands twice in the free list")
        if free != {p for p in range(1, self.num_pages + 1) if not self._references[p]}:
            raise RuntimeError("the free list differs from the pages without references")
