"""Which cached tokens each query of a part attends to.

A query that sees at most K keys selects all of them without being scored. The others are scored
by the indexer, tile by tile, so that no more scores exist at once than the workspace allows. The
selection stays in the plan: layers without index keys of their own use the one made before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import IndexQuery
from ..cached_rows import index_rows
from ..kernels.fp8_rows import quantise
from ..kernels.reference import index_scores
from ..kernels.topk import top_k_of_many
from ..metadata import Part
from ..slots import RequestSlots
from ..tiles import Tile, Workspace, decode_tiles, extend_tiles

# What a test or a debugging session may watch: layer, scores [T, L] of a tile, what each query sees
# of the L keys [T]. Called before the selection is made, for queries that see more than K.
OnScores = Callable[[int, Tensor, Tensor], None]

# Copies of a tile's scores, counted in 4 bytes a score, that the exact top-k makes at its worst.
TOP_K_COPIES = 14


@dataclass(frozen=True)
class SelectionSize:
    """index_topk K, and the bytes that scores and gathered rows may take."""

    topk: int
    workspace_bytes: int

    def workspace(self, query: IndexQuery) -> Workspace:
        """What scoring a tile takes: a copy of the keys, and for each query the dot products of
        all heads at first, the working copies of top-k after them."""
        _, heads, width = query.q_TnD.shape
        return Workspace(self.workspace_bytes // 4, width, max(2 * heads + 2, TOP_K_COPIES))


@dataclass
class Selection:
    """positions_TK: int64 positions in the request, ascending, -1 behind; refreshed in place.

    visible_T: keys each query sees. hidden_TK: bool, the places that hold no selection; `full`:
    there are none. scored_in: the layer whose index keys chose, None before any has.
    """

    part: Part
    is_extend: bool
    size: SelectionSize
    slots: RequestSlots
    positions_TK: Tensor
    offsets_T1: Tensor
    visible_T: Tensor
    hidden_TK: Tensor
    full: bool = False
    scored_in: int | None = None
    tiles: list[Tile] = field(default_factory=list)

    def refresh(self, part: Part) -> None:
        """Take another part of the same shape, keeping every tensor."""
        self.part, self.scored_in, self.tiles = part, None, []
        self.slots.refresh(part)
        self._fill()

    def _fill(self) -> None:
        """What no layer changes: the counts, and the choice of queries that see at most K keys."""
        topk, visible = self.size.topk, self.part.visible()
        device = self.visible_T.device
        self.visible_T.copy_(torch.tensor(visible, dtype=torch.int64, device=device))
        self.full = min(visible) >= topk
        if min(visible) > topk:
            return
        columns_K = torch.arange(topk, device=device)
        torch.ge(columns_K, self.visible_T.unsqueeze(1), out=self.hidden_TK)
        self.positions_TK.copy_(columns_K.expand_as(self.positions_TK))
        self.positions_TK.masked_fill_(self.hidden_TK, -1)

    def score(
        self,
        layer: int,
        query: IndexQuery,
        storage: CacheStorage,
        on_scores: OnScores | None = None,
    ) -> None:
        """Select for every query that sees more than K keys."""
        if not self.tiles:
            self.tiles = self._cut(self.size.workspace(query))
        if storage.layout.is_fp8:
            query = _rounded(query)
        topk = self.size.topk
        for tile in self.tiles:
            keys = tile.read(lambda slots: index_rows(storage, layer, slots))
            scores_GwL = index_scores(tile.take(query.q_TnD), tile.take(query.weights_Tn), *keys)
            scores_TL = scores_GwL.flatten(0, 1)
            if tile.hidden_TX is not None:
                scores_TL[:, tile.first_hidden :].masked_fill_(tile.hidden_TX, float("-inf"))
            if on_scores is not None:
                on_scores(layer, scores_TL, tile.visible_T)
            self.positions_TK[tile.tokens] = top_k_of_many(scores_TL, tile.visible_T, topk)
        self.scored_in = layer

    def _cut(self, workspace: Workspace) -> list[Tile]:
        topk = self.size.topk
        if not self.is_extend:
            return decode_tiles(self.part, self.slots, workspace, longer_than=topk)
        return [
            tile
            for request in range(len(self.part))
            for tile in extend_tiles(self.part, request, self.slots, workspace, skip=topk)
        ]

    def slots_of(self, rows: slice) -> Tensor:
        """Cache slots [T, K] of the selection; empty places read the request's first slot."""
        places_TK = self.positions_TK[rows]
        if not self.full:
            places_TK = places_TK.clamp(min=0)
        if len(self.part) > 1:
            places_TK = places_TK + self.offsets_T1[rows]
        return torch.take(self.slots.table_BL, places_TK)


def _rounded(query: IndexQuery) -> IndexQuery:
    """Queries as fp8 holds them, in fp32: what meets keys in fp8 is rounded like them."""
    values_TnD, scales_Tn = quantise(query.q_TnD)
    return IndexQuery(values_TnD.float() * scales_Tn.unsqueeze(-1), query.weights_Tn)


def new_selection(part: Part, size: SelectionSize, page_size: int, *, is_extend: bool) -> Selection:
    """Buffers for a part, filled with what no layer changes."""
    device = part.block_table_BP.device
    slots = RequestSlots(part, page_size)
    length = slots.table_BL.shape[1]
    requests = [r * length for r, count in enumerate(part.query_lens) for _ in range(count)]
    selection = Selection(
        part=part,
        is_extend=is_extend,
        size=size,
        slots=slots,
        positions_TK=torch.zeros(part.num_tokens, size.topk, dtype=torch.int64, device=device),
        offsets_T1=torch.tensor(requests, dtype=torch.int64, device=device).unsqueeze(1),
        visible_T=torch.empty(part.num_tokens, dtype=torch.int64, device=device),
        hidden_TK=torch.empty(part.num_tokens, size.topk, dtype=torch.bool, device=device),
    )
    selection._fill()
    return selection
