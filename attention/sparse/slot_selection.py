"""The selection by kernels: cache slots of the chosen keys, scored over the pages in place.

Every query is scored, those that see at most K keys too: their choice comes out the same, and the
work of a decode then depends on nothing but its shape.

A row in fp8 that many queries of a prompt read is converted once: a layer's rows of the part are
copied in the model's format, and the selection is of places in that copy.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import IndexQuery, MlaLayer, Query, SlotAttention
from ..cached_rows import expand_rows, index_pages
from ..kernels.cache_write import quantise_index_queries
from ..kernels.fp8_rows import IndexPages
from ..kernels.index_select import SelectionPlan, plan_selection, select_keys
from ..kernels.launch import power_of_two
from ..kernels.topk_triton import K_MAX
from ..metadata import Part
from ..workspace import EXPANDED_BYTES
from .choice import attend_in_place

# The least that a side of a tensor core's product has.
FEWEST = 16
MOST_HEADS = 256
# Queries of a part from which on fp8 rows are converted once for all of them.
MANY_QUERIES = 64


def suits(storage: CacheStorage, topk: int) -> bool:
    """Whether the kernels take these pages and this many keys."""
    sizes = (storage.page_size, storage.layout.index_width)
    return topk <= K_MAX and all(n >= FEWEST and n == power_of_two(n) for n in sizes)


@dataclass
class SlotSelection:
    """See `Choice`.

    slots_TK: int32 cache slots, by ascending position, -1 behind; refreshed in place.
    workspace_X: fp32, for the scores of one chunk of queries. table_BP: a copy of the block table,
    reach: tokens it can hold of a request. scored_in: as in `Selection`. expands: slots are places
    in a copy of the part's rows, the requests' one behind the other.
    """

    part: Part
    is_extend: bool
    workspace_X: Tensor
    slots_TK: Tensor
    table_BP: Tensor
    reach: int
    kernel: SlotAttention
    expands: bool = False
    scored_in: int | None = None
    plan: SelectionPlan | None = None

    @classmethod
    def of(
        cls,
        part: Part,
        topk: int,
        storage: CacheStorage,
        workspace_X: Tensor,
        *,
        is_extend: bool,
        kernel: SlotAttention,
    ) -> "SlotSelection":
        table_BP = part.block_table_BP.clone()
        shape = (part.num_tokens, topk)
        slots_TK = torch.empty(shape, dtype=torch.int32, device=table_BP.device)
        reach = table_BP.shape[1] * storage.page_size
        row_bytes = storage.layout.latent_width * storage.dtype.itemsize
        expands = (
            is_extend
            and storage.layout.is_fp8
            and part.num_tokens >= MANY_QUERIES
            and len(part) * reach * row_bytes <= EXPANDED_BYTES
        )
        return cls(part, is_extend, workspace_X, slots_TK, table_BP, reach, kernel, expands)

    @property
    def visible_T(self) -> Tensor:
        """int32 keys that each query sees; there once a layer has scored."""
        if self.plan is None:
            raise ValueError("no layer has scored yet")
        return self.plan.visible_T

    def refresh(self, part: Part) -> None:
        """Take another part of the same shape, keeping every tensor."""
        self.part, self.scored_in = part, None
        self.table_BP.copy_(part.block_table_BP)
        if self.plan is not None:
            visible = torch.tensor(part.visible(), dtype=torch.int32)
            self.plan.visible_T.copy_(visible, non_blocking=True)

    def score(self, layer: int, query: IndexQuery, storage: CacheStorage) -> None:
        """Select for every query of the part."""
        q_TnD, weights_Tn = query.q_TnD, query.weights_Tn.float()
        pages = index_pages(storage, layer)
        if isinstance(pages, IndexPages):
            q_TnD, weights_Tn = quantise_index_queries(q_TnD.contiguous(), weights_Tn, None)
        q_TnD, weights_Tn = _whole_heads(q_TnD, weights_Tn)
        if self.plan is None:
            self.plan = plan_selection(
                self.part.query_lens,
                self.part.context_lens,
                q_TnD.shape[1],
                self.workspace_X,
                # A decode's lengths grow while its shape stays.
                columns=None if self.is_extend else self.reach,
            )
        out_TK, table_BP = self.slots_TK, self.table_BP
        as_slots = not self.expands
        select_keys(self.plan, q_TnD, weights_Tn, pages, table_BP, out_TK, as_slots=as_slots)
        if self.expands and len(self.part) > 1:
            first_T1 = self.plan.request_T.unsqueeze(1) * self.reach
            torch.where(out_TK < 0, out_TK, out_TK + first_T1, out=out_TK)
        self.scored_in = layer

    def attend(self, layer: MlaLayer, q: Query, storage: CacheStorage) -> Tensor:
        """Attention [T, H, V] of the part's queries."""
        chosen = self.slots_TK, self.visible_T
        return attend_in_place(self.kernel, layer, q, self.rows(layer.index, storage), chosen)

    def rows(self, layer: int, storage: CacheStorage) -> Tensor:
        """What slots_TK points into: all rows of the layer, or a copy of the part's."""
        if not self.expands:
            return storage.latent_rows(layer, slice(None))
        return expand_rows(storage, layer, self.table_BP)


def _whole_heads(q_TnD: Tensor, weights_Tn: Tensor) -> tuple[Tensor, Tensor]:
    """Padded with heads of weight 0 to a number that the kernels take."""
    heads = q_TnD.shape[1]
    wanted = max(FEWEST, power_of_two(heads))
    if wanted > MOST_HEADS:
        raise ValueError(f"the indexer has {heads} heads; its kernels take up to {MOST_HEADS}")
    if wanted == heads:
        return q_TnD.contiguous(), weights_Tn.contiguous()
    # Padding has no fp8 of its own: bytes of 0 are zeros in it as well.
    raw_TnD = q_TnD.view(torch.uint8) if q_TnD.dtype.itemsize == 1 else q_TnD
    padded_TnD = F.pad(raw_TnD, (0, 0, 0, wanted - heads)).view(q_TnD.dtype)
    return padded_TnD, F.pad(weights_Tn, (0, wanted - heads))
