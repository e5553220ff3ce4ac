"""Rows of pages that the device gave up, kept in host memory under their keys.

A page moves whole: its latent rows and its index rows are copied together, in every layer that owns
any. On CUDA the host memory is pinned and copies run on a stream of their own: it starts behind
what was computed, and what is computed next waits for it, while the host waits for nothing. On the
CPU the same code copies plain memory.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .storage import CacheStorage

PAGES_AT_ONCE = 16
"""Pages that are gathered before they are copied: bounds the memory that copying needs."""


class HostTier:
    """Room for as many pages as fit in `num_bytes`; the one used longest ago makes way.

    Calls only note what to copy; `settle` copies, in the order of the calls. Raises ValueError if
    not one page fits.
    """

    def __init__(self, storage: CacheStorage, num_bytes: int) -> None:
        self._planes = [_by_page(plane, storage.page_size) for plane in storage.planes()]
        page_bytes = sum(plane.nbytes // len(plane) for plane in self._planes)
        self.num_pages = num_bytes // page_bytes
        if self.num_pages < 1:
            raise ValueError(f"host_bytes is {num_bytes}; one page takes {page_bytes}")
        device = self._planes[0].device
        on_cuda = device.type == "cuda"
        self._rooms = [
            torch.empty((self.num_pages, *p.shape[1:]), dtype=p.dtype, pin_memory=on_cuda)
            for p in self._planes
        ]
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._free = list(range(self.num_pages))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # used longest ago first
        self._noted: list[tuple[bool, int, int]] = []  # is a load, page, place

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, key: object) -> bool:
        return key in self._place_of

    def store(self, page: int, key: bytes) -> None:
        """Keep the rows that `page` holds now."""
        place = self._place_of.get(key)
        if place is None:
            place = self._free.pop() if self._free else self._place_of.popitem(last=False)[1]
            self._place_of[key] = place
            self._noted.append((False, page, place))
        self._place_of.move_to_end(key)

    def load(self, key: bytes, page: int) -> None:
        """Write the rows of `key` to `page`; KeyError if they are not here."""
        self._place_of.move_to_end(key)
        self._noted.append((True, page, self._place_of[key]))

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """Let these rows, or all, not be found any more."""
        for key in list(self._place_of) if keys is None else keys:
            place = self._place_of.pop(key, None)
            if place is not None:
                self._free.append(place)

    def settle(self) -> None:
        """Copy what was noted; whatever the device computes from now on comes after it."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        with self._lane():
            start = 0
            for stop in range(1, len(noted) + 1):
                is_last = stop == len(noted) or noted[stop][0] != noted[start][0]
                if is_last or stop - start == PAGES_AT_ONCE:
                    self._copy(noted[start:stop])
                    start = stop

    @contextlib.contextmanager
    def _lane(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        computing = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield
        computing.wait_stream(self._stream)

    def _copy(self, noted: Sequence[tuple[bool, int, int]]) -> None:
        """Copy pages in one direction, through a piece of device memory without gaps."""
        is_load, places = noted[0][0], [place for _, _, place in noted]
        pages = torch.tensor([page for _, page, _ in noted]).to(
            self._planes[0].device, non_blocking=True
        )
        for plane, room in zip(self._planes, self._rooms, strict=True):
            if is_load:
                shape = (len(noted), *plane.shape[1:])
                piece = torch.empty(shape, dtype=plane.dtype, device=plane.device)
                for i, place in enumerate(places):
                    piece[i].copy_(room[place], non_blocking=True)
                plane.index_copy_(0, pages, piece)
            else:
                piece = plane.index_select(0, pages)
                for i, place in enumerate(places):
                    room[place].copy_(piece[i], non_blocking=True)


def _by_page(plane: Tensor, page_size: int) -> Tensor:
    """A view [pages, ..., page_size, width] of rows [..., slots, width]."""
    return plane.unflatten(-2, (-1, page_size)).movedim(-3, 0)
