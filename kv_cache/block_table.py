"""The pages of one request, in the order of its tokens."""

from dataclasses import dataclass, field


@dataclass
class BlockTable:
    """Token i of the request lives in page i // page_size at offset i % page_size."""

    page_size: int
    pages: list[int] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the pages held now."""
        return len(self.pages) * self.page_size

    def slots(self, start: int, stop: int) -> list[int]:
        """Cache slots of tokens start..stop-1; the table must reach that far."""
        size, pages = self.page_size, self.pages
        return [pages[i // size] * size + i % size for i in range(start, stop)]
