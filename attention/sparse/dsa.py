"""DeepSeek Sparse Attention: dense while everything is short, the indexer's selection above.

A row that sees at most `index_topk` keys selects all of them, so dense attention is exact there.
The choice is made for the extend part and the decode part of a step apart, from host lengths: the
length of the whole request counts, not that of the chunk in hand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import AttentionBackend, IndexQuery, MlaLayer, Plan, Query
from ..groups import DecodeGroup, group_decodes, over_groups, request_slots
from ..kernels.reference import absorbed_query, index_scores, latent_attention, unabsorb
from ..kernels.topk import select
from ..metadata import AttentionBatch

Mode = Literal["auto", "sparse", "dense"]

# What a test or a debugging session may watch: layer, positions [T, K] (-1 after), counts [T].
OnSelect = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class DsaPlan:
    """The dense plan for the parts that are short, and slots for those that select."""

    batch: AttentionBatch
    dense: Plan
    sparse_extends: bool
    sparse_decodes: bool
    groups: list[DecodeGroup]
    extend_slots: list[Tensor]

    @property
    def selects(self) -> bool:
        return self.sparse_extends or self.sparse_decodes


class DsaBackend:
    """See `base.AttentionBackend`; `workspace_bytes` bounds the scores and the gathered rows."""

    def __init__(
        self,
        dense: AttentionBackend,
        storage: CacheStorage,
        index_topk: int,
        *,
        workspace_bytes: int = 64 << 20,
        mode: Mode = "auto",
        on_select: OnSelect | None = None,
    ) -> None:
        self.name = f"dsa over {dense.name}"
        self.page_size = storage.page_size
        self.dense = dense
        self.storage = storage
        self.index_topk = index_topk
        self.workspace_bytes = workspace_bytes
        self.mode = mode
        self.on_select = on_select

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> DsaPlan:
        if out is not None:
            raise ValueError("plans of the torch path follow the lengths and are made anew")
        n = batch.num_extends
        sparse_extends = self._is_sparse(batch.kv_lens[:n])
        sparse_decodes = self._is_sparse(batch.kv_lens[n:])
        return DsaPlan(
            batch=batch,
            dense=self.dense.plan(batch),
            sparse_extends=sparse_extends,
            sparse_decodes=sparse_decodes,
            groups=group_decodes(batch, self.page_size, self._max_keys(batch))
            if sparse_decodes
            else [],
            extend_slots=[
                request_slots(batch, r, self.page_size).unsqueeze(0)
                for r in range(n * sparse_extends)
            ],
        )

    def _max_keys(self, batch: AttentionBatch) -> int:
        return self.workspace_bytes // (4 * 64 * max(batch.decode_width, 1))

    def _is_sparse(self, kv_lens: tuple[int, ...]) -> bool:
        if self.mode == "auto":
            return max(kv_lens, default=0) > self.index_topk
        return self.mode == "sparse" and bool(kv_lens)

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        if not plan.sparse_decodes:
            return self.dense.decode(layer, q, plan.dense)
        index = _index_query(q)

        def attend(group: DecodeGroup, q_GwHX: Tensor) -> Tensor:
            q_GwnD, weights_Gwn = group.take(index.q_TnD), group.take(index.weights_Tn)
            keys_GLD = self.storage.index_rows(layer.index, group.slots_GL)
            scores_GwL = index_scores(q_GwnD, weights_Gwn, keys_GLD)
            slots_TL = group.slots_GL.repeat_interleave(q_GwHX.shape[1], dim=0)
            return self._attend_selected(
                layer,
                q_GwHX.flatten(0, 1),
                scores_GwL.flatten(0, 1),
                group.counts_Gw.flatten(),
                slots_TL,
            )

        q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        return unabsorb(over_groups(plan.groups, q_THX, attend), layer.w_uv_HVC)

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        if not plan.sparse_extends:
            return self.dense.prefill(layer, q, plan.dense)
        outputs, start = [], 0
        for request, slots_1L in enumerate(plan.extend_slots):
            stop = start + plan.batch.query_lens[request]
            context = plan.batch.context_lens[request]
            outputs += self._prefill_one(layer, q.rows(start, stop), slots_1L, context)
            start = stop
        return unabsorb(torch.cat(outputs), layer.w_uv_HVC)

    def _prefill_one(
        self, layer: MlaLayer, q: Query, slots_1L: Tensor, context: int
    ) -> Iterator[Tensor]:
        """Attended latents of one prompt chunk, in blocks of rows that fit the workspace."""
        index = _index_query(q)
        keys_1LD = self.storage.index_rows(layer.index, slots_1L)
        q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        heads, length = index.q_TnD.shape[1], slots_1L.shape[1]
        row_bytes = 4 * max(heads * length, self.index_topk * q_THX.shape[2])
        block = max(1, self.workspace_bytes // row_bytes)
        for first in range(0, len(q_THX), block):
            rows = slice(first, first + block)
            scores_1TL = index_scores(
                index.q_TnD[None, rows], index.weights_Tn[None, rows], keys_1LD
            )
            counts_T = torch.arange(scores_1TL.shape[1], device=slots_1L.device)
            counts_T += context + first + 1
            yield self._attend_selected(layer, q_THX[rows], scores_1TL[0], counts_T, slots_1L)

    def _attend_selected(
        self, layer: MlaLayer, q_THX: Tensor, scores_TL: Tensor, counts_T: Tensor, slots_TL: Tensor
    ) -> Tensor:
        """Attend to the best `index_topk` of each row's first counts_T[t] keys; returns [T, H, C].

        slots_TL may have a single row that all queries share.
        """
        positions_TK, chosen_T = select(scores_TL, counts_T, self.index_topk)
        if self.on_select is not None:
            self.on_select(layer.index, positions_TK, chosen_T)
        # Places without a selection read the request's first row, which is masked out.
        places_TK = positions_TK.clamp(min=0)
        slots_TK = slots_TL.expand(len(places_TK), -1).gather(1, places_TK)
        rows_TKX = self.storage.latent_rows(layer.index, slots_TK)
        chosen_TH = chosen_T.unsqueeze(1).expand(-1, q_THX.shape[1])
        return latent_attention(q_THX, rows_TKX, chosen_TH, layer.w_uk_HNC.shape[2])


def _own(plan: Plan) -> DsaPlan:
    if not isinstance(plan, DsaPlan):
        raise TypeError(f"a DsaPlan is expected, got {type(plan).__name__}")
    return plan


def _index_query(q: Query) -> IndexQuery:
    if q.index is None:
        raise ValueError("the plan selects, but the query has no index part")
    return q.index
