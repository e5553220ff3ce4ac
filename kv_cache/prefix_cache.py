"""Pages that hold the rows of known prefixes, found again by the tokens they were computed from.

A page's key is the sha256 of every id up to the end of the page, behind the salt of a tenant and
the number of ids a page holds. One digest runs through a request and is read at the end of each
page, so equal keys mean equal rows of one tenant; what another tenant has cached can neither be
used nor noticed.

Only full pages have keys. A page keeps its key while requests hold it and after the last of them
let go of it: then it is idle, and the page that has been idle for longest is given up first when
pages are short. Requests let go of their last page first, so a prefix outlives what continues it.
"""

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

_WORD = "I" if array("I").itemsize == 4 else "L"


def root_key(*salts: str) -> bytes:
    """What the chain of a tenant begins with; each salt is framed by its length."""
    digest = sha256(b"minidsa prefix")
    for salt in salts:
        data = salt.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


class KeyChain:
    """The keys of the full pages of one request, in order; it only ever grows."""

    def __init__(self, root: bytes, page_size: int) -> None:
        self.keys: list[bytes] = []
        self._digest = sha256(root + struct.pack("<I", page_size))
        self._page_size = page_size

    @property
    def num_tokens(self) -> int:
        """Tokens that the keys cover."""
        return len(self.keys) * self._page_size

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the keys of whole pages of ids that follow those covered; ids are below 2**32."""
        data, size = array(_WORD, token_ids).tobytes(), 4 * self._page_size
        digest = self._digest
        for start in range(0, len(data), size):
            digest.update(data[start : start + size])
            self.keys.append(digest.digest())


class PrefixCache:
    """Which page holds which key, and which of those pages are idle."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle for longest first

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, page: object) -> bool:
        return page in self._key_of

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds and that can be given up."""
        return len(self._idle)

    @property
    def idle(self) -> Iterable[int]:
        """The idle pages, the one to be given up next first."""
        return self._idle.keys()

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of `keys` that is cached from the first one on."""
        # Page 0 is nobody's, so it can stand for what is not cached.
        pages = [self._page_of.get(key, 0) for key in keys]
        return pages[: pages.index(0)] if 0 in pages else pages

    def publish(self, page: int, key: bytes) -> None:
        """Let a held page whose rows are all computed be found; the first page of a key stays."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def count_idle(self, pages: Iterable[int]) -> int:
        return sum(map(self._idle.__contains__, pages))

    def wake(self, pages: Iterable[int]) -> None:
        """The pages are held from now on."""
        for page in pages:
            self._idle.pop(page, None)

    def rest(self, pages: Iterable[int]) -> None:
        """Nobody holds these pages any more; the first of them is given up before the others."""
        for page in pages:
            self._idle[page] = None

    def give_up(self) -> tuple[int, bytes]:
        """Forget the page that has been idle for longest; KeyError if none is idle."""
        page, _ = self._idle.popitem(last=False)
        return page, self._drop(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Let held pages not be found any more."""
        for page in pages:
            if page in self._key_of:
                self._drop(page)

    def clear(self) -> list[int]:
        """Forget every key; returns the pages that were idle."""
        idle = list(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        return idle

    def check(self) -> None:
        """Raise RuntimeError unless keys and pages belong together one by one."""
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise RuntimeError("keys and pages of the prefix cache differ")
        if not self._idle.keys() <= self._key_of.keys():
            raise RuntimeError("a page without a key is idle instead of free")

    def _drop(self, page: int) -> bytes:
        key = self._key_of.pop(page)
        del self._page_of[key]
        return key
