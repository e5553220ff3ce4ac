"""The cache as the scheduler uses it: grow a block table, give it back, check the books."""

from collections.abc import Iterable

from .block_table import BlockTable
from .pool import PagePool


class KvCache:
    """Pages of `page_size` tokens, handed to block tables."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size

    @property
    def num_tokens(self) -> int:
        """Tokens that fit when nothing is cached."""
        return self.pool.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def grow(self, table: BlockTable, num_tokens: int, spare: int = 0) -> bool:
        """Make room for `num_tokens` in all and leave `spare` pages free.

        False, with nothing taken, if pages are short.
        """
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing + spare > self.pool.num_free:
            return False
        if missing > 0:
            table.pages.extend(self.pool.take(missing))
        return True

    def release(self, table: BlockTable) -> None:
        """Give back every page of the table, which is empty afterwards."""
        self.pool.release(table.pages)
        table.pages.clear()

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError if any page is lost, held twice or held by nobody."""
        self.pool.check(table.pages for table in tables)
