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
from ..base import IndexQuery, MlaLayer, Query, SlotAttention
from ..cached_rows import index_rows, latent_rows
from ..kernels.fp8_rows import quantise
from ..kernels.reference import BLOCK, absorbed_query, index_scores, latent_attention, unabsorb
from ..kernels.topk import check_selection, top_k_of_many
from ..metadata import Part
from ..slots import RequestSlots
from ..tiles import Tile, Workspace, decode_tiles, extend_tiles
from .choice import attend_in_place

# What a test or a debugging session may watch: layer, scores [T, L] of a tile, what each query sees
# of the L keys [T]. Called before the selection is made, for queries that see more than K.
OnScores = Callable[[int, Tensor, Tensor], None]
# The same of the result: layer, positions [T, K] (-1 behind), counts [T]. Called once a layer for
# each part that selects, extends first, with the tensor that is used next.
OnSelect = Callable[[int, Tensor, Tensor], None]

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


@dataclass(frozen=True)
class Watch:
    """Who looks on. checks: an impossible selection raises RuntimeError."""

    on_scores: OnScores | None = None
    on_select: OnSelect | None = None
    checks: bool = False

    @property
    def looks(self) -> bool:
        return self.checks or self.on_scores is not None or self.on_select is not None


NOBODY = Watch()


@dataclass
class Selection:
    """See `Choice`.

    positions_TK: int64 positions in the request, ascending, -1 behind; refreshed in place.
    visible_T: keys each query sees. hidden_TK: bool, the places that hold no selection; `full`:
    there are none. kernel: attends to rows in place; None: they are gathered.
    """

    part: Part
    is_extend: bool
    size: SelectionSize
    slots: RequestSlots
    positions_TK: Tensor
    offsets_T1: Tensor
    visible_T: Tensor
    hidden_TK: Tensor
    watch: Watch
    kernel: SlotAttention | None
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

    def score(self, layer: int, query: IndexQuery, storage: CacheStorage) -> None:
        """Select for every query that sees more than K keys."""
        if not self.tiles:
            self.tiles = self._cut(self.size.workspace(query))
        if storage.layout.is_fp8:
            query = _rounded(query)
        topk, watch = self.size.topk, self.watch
        for tile in self.tiles:
            keys = tile.read(lambda slots: index_rows(storage, layer, slots))
            scores_GwL = index_scores(tile.take(query.q_TnD), tile.take(query.weights_Tn), *keys)
            scores_TL = scores_GwL.flatten(0, 1)
            if tile.hidden_TX is not None:
                scores_TL[:, tile.first_hidden :].masked_fill_(tile.hidden_TX, float("-inf"))
            if watch.on_scores is not None:
                watch.on_scores(layer, scores_TL, tile.visible_T)
            tile.put(self.positions_TK, top_k_of_many(scores_TL, tile.visible_T, topk))
        self.scored_in = layer
        if watch.on_select is not None:
            watch.on_select(layer, self.positions_TK, self.visible_T.clamp(max=topk))
        if watch.checks:
            check_selection(self.positions_TK, self.visible_T)

    def attend(self, layer: MlaLayer, q: Query, storage: CacheStorage) -> Tensor:
        """Attention [T, H, V] of the part's queries; a few of them at a time where rows are
        gathered."""
        if self.kernel is not None:
            chosen = self.slots_of(slice(0, len(q.nope_THN))), self.visible_T
            rows_SX = storage.latent_rows(layer.index, slice(None))
            return attend_in_place(self.kernel, layer, q, rows_SX, chosen)
        q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        tokens, heads, width = q_THX.shape
        latent = layer.w_uk_HNC.shape[2]
        keys = -(-self.size.topk // BLOCK) * BLOCK
        # A query's rows, the scores of all heads, their softmax, and a sum for each block of keys.
        per_query = keys * (width + 2 * heads) + keys // BLOCK * heads * latent
        step = max(1, self.size.workspace_bytes // (4 * per_query))
        if step >= tokens:
            out_THC = self._attend_rows(layer, q_THX, storage, slice(0, tokens))
            return unabsorb(out_THC, layer.w_uv_HVC)
        out_THC = q_THX.new_empty(tokens, heads, latent)
        for first in range(0, tokens, step):
            rows = slice(first, first + step)
            out_THC[rows] = self._attend_rows(layer, q_THX[rows], storage, rows)
        return unabsorb(out_THC, layer.w_uv_HVC)

    def _attend_rows(
        self, layer: MlaLayer, q_THX: Tensor, storage: CacheStorage, rows: slice
    ) -> Tensor:
        """Attended latents [T, H, C] of some queries. A row is computed alike in any company."""
        rows_TKX = latent_rows(storage, layer.index, self.slots_of(rows))
        hidden_T1K = None if self.full else self.hidden_TK[rows].unsqueeze(1)
        out_THC = latent_attention(q_THX, rows_TKX, hidden_T1K, layer.w_uk_HNC.shape[2])
        if hidden_T1K is not None:
            # A padding query sees nothing.
            out_THC.masked_fill_(hidden_T1K[:, :, :1], 0.0)
        return out_THC

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
        places_TK = self.positions_TK
        if rows.stop - rows.start < len(places_TK):
            places_TK = places_TK[rows]
        if not self.full:
            places_TK = places_TK.clamp(min=0)
        if len(self.part) > 1:
            places_TK = places_TK + self.offsets_T1[rows]
        return torch.take(self.slots.table_BL, places_TK)


def _rounded(query: IndexQuery) -> IndexQuery:
    """Queries as fp8 holds them, in fp32: what meets keys in fp8 is rounded like them."""
    values_TnD, scales_Tn = quantise(query.q_TnD)
    return IndexQuery(values_TnD.float() * scales_Tn.unsqueeze(-1), query.weights_Tn)


def new_selection(
    part: Part,
    size: SelectionSize,
    page_size: int,
    *,
    is_extend: bool,
    watch: Watch = NOBODY,
    kernel: SlotAttention | None = None,
) -> Selection:
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
        watch=watch,
        kernel=kernel,
    )
    selection._fill()
    return selection
