"""Where the tokens of a step's requests lie in the cache: block tables spelled out as slots.

The same for all layers, hence made once a step.
"""

import numpy as np
import torch
from torch import Tensor

from .kernels.reference import BLOCK, FEWEST_COLUMNS
from .metadata import Part

# So many tokens on consecutive pages are worth an operation of their own; fewer are copied.
LONG_RUN = 128
# No piece of a longer request is shorter, or a score would depend on where its pages lie.
SHORTEST_PIECE = FEWEST_COLUMNS


class RequestSlots:
    """The cache slot of every position of a part's requests; refreshed in place.

    table_BL: int64, L = block table width * page size, up to a multiple of BLOCK. Places beyond a
    request's length repeat its first slot: what pads a tile is then a row that the request owns,
    never an unwritten one.

    Raises ValueError when a request is longer than the block table reaches.
    """

    def __init__(self, part: Part, page_size: int) -> None:
        self.page_size = page_size
        table_BP = part.block_table_BP
        self._reach = table_BP.shape[1] * page_size
        width = -(-self._reach // BLOCK) * BLOCK
        self.table_BL = torch.empty(len(part), width, dtype=torch.int64, device=table_BP.device)
        self.refresh(part)

    def refresh(self, part: Part) -> None:
        """Fill the table for another step of the same shape."""
        width = self.table_BL.shape[1]
        if part.longest > self._reach:
            raise ValueError(
                f"a request of {part.longest} tokens has a block table that reaches to "
                f"{self._reach}"
            )
        table_BP, device = part.block_table_BP, part.block_table_BP.device
        offsets_P = torch.arange(self.page_size, device=device)
        table_BPP = self.table_BL[:, : self._reach].unflatten(1, (-1, self.page_size))
        torch.add(table_BP.unsqueeze(-1) * self.page_size, offsets_P, out=table_BPP)
        self._part = part
        if len(set(part.kv_lens)) == 1:
            self.table_BL[:, max(1, part.longest) :] = self.table_BL[:, :1]
            return
        lengths_B1 = torch.tensor(part.kv_lens, device=device).unsqueeze(1)
        beyond_BL = torch.arange(width, device=device) >= lengths_B1
        first_B1 = self.table_BL[:, :1].clone()
        torch.where(beyond_BL, first_B1, self.table_BL, out=self.table_BL)

    def _runs(self, request: int) -> list[int]:
        """Where runs of consecutive pages of a request begin (in pages).

        [] for scattered pages, and where the table is not on the host: a look at it would wait for
        the device.
        """
        table_BP = self._part.block_table_BP
        if table_BP.device.type != "cpu":
            return []
        count = -(-self._part.kv_lens[request] // self.page_size)
        breaks = np.flatnonzero(np.diff(table_BP.numpy()[request, :count]) != 1) + 1
        # More breaks than that leave no run worth looking for.
        return [] if 2 * len(breaks) > count - 1 else [0, *breaks.tolist()]

    def has_long_run(self, request: int, length: int) -> bool:
        return any(is_run for _, _, is_run in self._spans(request, length))

    def pieces(self, request: int, length: int) -> list[slice | Tensor]:
        """The slots of its first `length` positions, in order: slices where runs of consecutive
        pages are long (they are read in place), int64 slots between them."""
        row_L = self.table_BL[request]
        pieces: list[slice | Tensor] = []
        for first, stop, is_run in self._spans(request, length):
            slots = row_L[first:stop]
            pieces.append(slice(int(slots[0]), int(slots[0]) + stop - first) if is_run else slots)
        return pieces

    def _spans(self, request: int, length: int) -> list[tuple[int, int, bool]]:
        """Positions first..stop-1 of each piece, and whether it is a long run."""
        size, starts = self.page_size, self._runs(request)
        spans: list[tuple[int, int, bool]] = []
        if not starts:
            return [(0, length, False)]
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            first, stop = start * size, min(stop * size, length)
            is_run = stop - first >= LONG_RUN
            if spans and not is_run and not spans[-1][2]:
                first = spans.pop()[0]
            if stop > first:
                spans.append((first, stop, is_run))
        return _lengthen(spans)


def _lengthen(spans: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Short pieces take the missing positions from the run before them, or after the first."""
    for i, (first, stop, is_run) in enumerate(spans):
        missing = SHORTEST_PIECE - (stop - first)
        if is_run or missing <= 0 or len(spans) == 1:
            continue
        if i:
            spans[i - 1] = (spans[i - 1][0], first - missing, True)
            spans[i] = (first - missing, stop, False)
        else:
            spans[1] = (stop + missing, spans[1][1], True)
            spans[0] = (first, stop + missing, False)
    return spans
