"""DeepSeek Sparse Attention: dense while everything is short, the indexer's selection above.

A row that sees at most `index_topk` keys selects all of them, so dense attention is exact there.
The choice is made for the extend part and the decode part of a step apart, from host lengths: the
length of the whole request counts, not that of the chunk in hand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...configs.sampling import AttentionRule
from ...kv_cache.storage import CacheStorage
from ..base import AttentionBackend, MlaLayer, Plan, Query, SlotAttention
from ..cached_rows import latent_rows
from ..kernels.reference import BLOCK, absorbed_query, latent_attention, unabsorb
from ..kernels.topk import check_selection
from ..metadata import AttentionBatch, Part
from ..workspace import SCORES_BYTES
from .selection import OnScores, Selection, SelectionSize, new_selection

if TYPE_CHECKING:
    from .slot_selection import SlotSelection

Mode = Literal["auto", "sparse", "dense"]

# What a test or a debugging session may watch: layer, positions [T, K] (-1 behind), counts [T].
# Called once a layer for each part that selects, extends first, with the tensor that is used next.
OnSelect = Callable[[int, Tensor, Tensor], None]

# Small enough that scores are still in the processor's cache when top-k reads them.
WORKSPACE_BYTES = 4 << 20


@dataclass
class DsaPlan:
    """The dense backend's plan for parts that are short, a selection for each of the others."""

    batch: AttentionBatch
    dense: Plan
    extends: "Selection | SlotSelection | None"
    decodes: "Selection | SlotSelection | None"

    @property
    def selects(self) -> bool:
        return self.extends is not None or self.decodes is not None


class DsaBackend:
    """See `base.AttentionBackend`; attends to what `dense` cannot do exactly.

    Selected rows are attended to in place where `dense` brings a kernel for that, else gathered.
    There the selection is made by kernels as well, where they take the pages and nobody watches.

    workspace_bytes bounds the index scores of a tile with all that top-k makes of them, and the
    rows gathered at once; down to those of one query.
    mode: "sparse" always selects, "dense" never does (and is then inexact above `index_topk`).
    on_select watches the selections and on_scores, which may be set later, what they are made of.
    check_selections raises RuntimeError on an impossible one.
    """

    slot_attention = None

    def __init__(
        self,
        dense: AttentionBackend,
        storage: CacheStorage,
        index_topk: int,
        *,
        workspace_bytes: int = WORKSPACE_BYTES,
        mode: Mode = "auto",
        on_select: OnSelect | None = None,
        check_selections: bool = False,
    ) -> None:
        if index_topk < 1:
            raise ValueError(f"index_topk must be at least 1, got {index_topk}")
        if mode not in ("auto", "sparse", "dense"):
            raise ValueError(f"mode {mode!r} does not exist; there are: auto, sparse, dense")
        self.name = f"dsa over {dense.name}"
        self.page_size = storage.page_size
        self.dense = dense
        self.storage = storage
        self.size = SelectionSize(index_topk, workspace_bytes)
        self.mode = mode
        self.on_scores: OnScores | None = None
        self.on_select = on_select
        self.check_selections = check_selections
        self._scores_X = self._score_room()

    def under(self, rule: AttentionRule) -> "DsaBackend":
        """This attention by a request's own rule: over the same rows, with its K and its mode."""
        return DsaBackend(
            self.dense,
            self.storage,
            rule.index_topk or self.size.topk,
            workspace_bytes=self.size.workspace_bytes,
            mode=rule.mode,
            on_select=self.on_select,
            check_selections=self.check_selections,
        )

    @property
    def replayable(self) -> bool:
        return self.dense.replayable and self._scores_X is not None

    def _score_room(self) -> Tensor | None:
        """Room for the scores of the kernels; None where they do not suit."""
        if self.dense.slot_attention is None:
            return None
        from .slot_selection import suits  # noqa: PLC0415 - only where triton is installed

        if not suits(self.storage, self.size.topk):
            return None
        device = self.storage.latent_LSC.device
        return torch.empty(SCORES_BYTES // 4, dtype=torch.float32, device=device)

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> DsaPlan:
        if out is not None:
            return self._refresh(_own(out), batch)
        return DsaPlan(
            batch=batch,
            dense=self.dense.plan(batch),
            extends=self._select(batch.extends, is_extend=True),
            decodes=self._select(batch.decodes, is_extend=False),
        )

    def _refresh(self, plan: DsaPlan, batch: AttentionBatch) -> DsaPlan:
        plan.batch.require_same_shape(batch)
        if self._is_sparse(batch.decodes) != plan.selects:
            kind, length = "sparse" if plan.selects else "dense", batch.decodes.longest
            raise ValueError(
                f"the plan is {kind}, but the longest request has {length} tokens and index_topk "
                f"is {self.size.topk}: make a new plan"
            )
        plan.dense = self.dense.plan(batch, out=plan.dense)
        plan.batch = batch
        if plan.decodes is not None:
            plan.decodes.refresh(batch.decodes)
        return plan

    def _select(self, part: Part, *, is_extend: bool) -> "Selection | SlotSelection | None":
        if not self._is_sparse(part):
            return None
        is_watched = self.on_scores or self.on_select or self.check_selections
        if self._scores_X is None or is_watched:
            return new_selection(part, self.size, self.page_size, is_extend=is_extend)
        from .slot_selection import SlotSelection  # noqa: PLC0415 - as in `_score_room`

        inputs = (self.size.topk, self.storage, self._scores_X)
        return SlotSelection.of(part, *inputs, is_extend=is_extend)

    def _is_sparse(self, part: Part) -> bool:
        return len(part) > 0 and self.selects(part.longest)

    def selects(self, longest: int) -> bool:
        return longest > self.size.topk if self.mode == "auto" else self.mode == "sparse"

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        if plan.decodes is None:
            return self.dense.decode(layer, q, plan.dense)
        return self._attend(layer, q, plan.decodes)

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        if plan.extends is None:
            return self.dense.prefill(layer, q, plan.dense)
        return self._attend(layer, q, plan.extends)

    def _attend(self, layer: MlaLayer, q: Query, selection: "Selection | SlotSelection") -> Tensor:
        q.require(selection.part.num_tokens, self.storage.dtype)
        self._score(layer.index, q, selection)
        if self.dense.slot_attention is not None:
            return self._attend_in_place(layer, q, selection, self.dense.slot_attention)
        if not isinstance(selection, Selection):
            raise TypeError("slots were selected for a backend that attends to none in place")
        q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        tokens, heads, width = q_THX.shape
        keys = -(-self.size.topk // BLOCK) * BLOCK
        # A query's rows, the scores of all heads, their softmax, and a sum for each block of keys.
        per_query = keys * (width + 2 * heads) + keys // BLOCK * heads * layer.w_uk_HNC.shape[2]
        step = max(1, self.size.workspace_bytes // (4 * per_query))
        if step >= tokens:
            out_THC = self._attend_rows(layer, q_THX, selection, slice(0, tokens))
            return unabsorb(out_THC, layer.w_uv_HVC)
        out_THC = q_THX.new_empty(*q_THX.shape[:2], layer.w_uk_HNC.shape[2])
        for first in range(0, tokens, step):
            rows = slice(first, first + step)
            out_THC[rows] = self._attend_rows(layer, q_THX[rows], selection, rows)
        return unabsorb(out_THC, layer.w_uv_HVC)

    def _score(self, layer: int, q: Query, selection: "Selection | SlotSelection") -> None:
        if self.storage.index_k[layer] is None:
            if selection.scored_in is None:
                raise ValueError(f"layer {layer} keeps no index keys and no layer before it chose")
            return
        if q.index is None:
            raise ValueError(f"the plan selects in layer {layer}, but the query has no index part")
        if not isinstance(selection, Selection):
            selection.score(layer, q.index, self.storage)
            return
        selection.score(layer, q.index, self.storage, self.on_scores)
        if self.on_select is not None:
            counts_T = selection.visible_T.clamp(max=self.size.topk)
            self.on_select(layer, selection.positions_TK, counts_T)
        if self.check_selections:
            check_selection(selection.positions_TK, selection.visible_T)

    def _attend_in_place(
        self,
        layer: MlaLayer,
        q: Query,
        selection: "Selection | SlotSelection",
        attend: SlotAttention,
    ) -> Tensor:
        from ..kernels.absorb import absorb_queries, unabsorb_latents  # noqa: PLC0415 - as above

        q_THX = absorb_queries(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        if isinstance(selection, Selection):
            rows_SX = self.storage.latent_rows(layer.index, slice(None))
            slots_TK = selection.slots_of(slice(0, len(q_THX)))
        else:
            rows_SX = selection.rows(layer.index, self.storage)
            slots_TK = selection.slots_TK
        width = layer.w_uk_HNC.shape[2]
        out_THC, _ = attend(q_THX, rows_SX, slots_TK, selection.visible_T, width)
        return unabsorb_latents(out_THC, layer.w_uv_HVC)

    def _attend_rows(
        self, layer: MlaLayer, q_THX: Tensor, selection: Selection, rows: slice
    ) -> Tensor:
        """Attended latents [T, H, C] of some queries. A row is computed alike in any company."""
        rows_TKX = latent_rows(self.storage, layer.index, selection.slots_of(rows))
        hidden_T1K = None if selection.full else selection.hidden_TK[rows].unsqueeze(1)
        out_THC = latent_attention(q_THX, rows_TKX, hidden_T1K, layer.w_uk_HNC.shape[2])
        if hidden_T1K is not None:
            # A padding query sees nothing.
            out_THC.masked_fill_(hidden_T1K[:, :, :1], 0.0)
        return out_THC


def _own(plan: Plan) -> DsaPlan:
    if not isinstance(plan, DsaPlan):
        raise TypeError(f"a DsaPlan is expected, got {type(plan).__name__}")
    return plan
