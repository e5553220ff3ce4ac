"""Where the tokens of a step's requests lie in the cache: block tables spelled out as slots.

The same for all layers, hence made once a step.
"""

import torch
from torch import Tensor

from .metadata import Part


class RequestSlots:
    """The cache slot of every position of a part's requests; refreshed in place.

    table_BL: int64, L = block table width * page size. Places beyond a request's length repeat
    its first slot: what pads a tile is then a row that the request owns, never an unwritten one.

    Raises ValueError when a request is longer than the block table reaches.
    """

    def __init__(self, part: Part, page_size: int) -> None:
        self.page_size = page_size
        table_BP = part.block_table_BP
        self.table_BL = torch.empty(
            len(part), table_BP.shape[1] * page_size, dtype=torch.int64, device=table_BP.device
        )
        self.refresh(part)

    def refresh(self, part: Part) -> None:
        """Fill the table for another step of the same shape."""
        reach = self.table_BL.shape[1]
        if part.longest > reach:
            raise ValueError(
                f"a request of {part.longest} tokens has a block table that reaches to {reach}"
            )
        table_BP, device = part.block_table_BP, part.block_table_BP.device
        offsets_P = torch.arange(self.page_size, device=device)
        table_BPP = self.table_BL.view(*table_BP.shape, self.page_size)
        torch.add(table_BP.unsqueeze(-1) * self.page_size, offsets_P, out=table_BPP)
        if len(set(part.kv_lens)) > 1 or part.longest < reach:
            lengths_B1 = torch.tensor(part.kv_lens, device=device).unsqueeze(1)
            beyond_BL = torch.arange(reach, device=device) >= lengths_B1
            first_B1 = self.table_BL[:, :1].clone()
            torch.where(beyond_BL, first_B1, self.table_BL, out=self.table_BL)
        self._starts = self._find_runs(part)

    def _find_runs(self, part: Part) -> list[int | None]:
        """First slots of requests whose pages follow one another; None for the others.

        Only where the table is on the host: elsewhere a look at it would wait for the device.
        """
        if part.block_table_BP.device.type != "cpu":
            return [None] * len(part)
        starts: list[int | None] = []
        for pages, length in zip(part.block_table_BP.tolist(), part.kv_lens, strict=True):
            count = -(-length // self.page_size)
            run = list(range(pages[0], pages[0] + count)) if pages else []
            starts.append(run[0] * self.page_size if run and pages[:count] == run else None)
        return starts

    def is_run(self, request: int) -> bool:
        return self._starts[request] is not None

    def of_request(self, request: int, length: int) -> Tensor | slice:
        """Slots of its first `length` positions: a slice where they are consecutive."""
        start = self._starts[request]
        return self.table_BL[request, :length] if start is None else slice(start, start + length)
