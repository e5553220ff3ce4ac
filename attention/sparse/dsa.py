"""DeepSeek Sparse Attention: dense while everything is short, the indexer's selection above.

A row that sees at most `index_topk` keys selects all of them, so dense attention is exact there.
The choice is made for the extend part and the decode part of a step apart, from host lengths: the
length of the whole request counts, not that of the chunk in hand.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...configs.sampling import AttentionRule
from ...kv_cache.storage import CacheStorage
from ..base import AttentionBackend, MlaLayer, Plan, Query
from ..metadata import AttentionBatch, Part
from ..workspace import SCORES_BYTES
from .choice import Choice
from .selection import OnScores, OnSelect, SelectionSize, Watch, new_selection
from .selection_clock import SelectionClock

Mode = Literal["auto", "sparse", "dense"]

# Small enough that scores are still in the processor's cache when top-k reads them.
WORKSPACE_BYTES = 4 << 20


@dataclass
class DsaPlan:
    """The dense backend's plan for parts that are short, a selection for each of the others."""

    batch: AttentionBatch
    dense: Plan
    extends: Choice | None
    decodes: Choice | None

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
        self.clock = SelectionClock(storage.latent_LSC.device)
        self._scores_X = self._score_room()

    def under(self, rule: AttentionRule) -> "DsaBackend":
        """This attention by a request's own rule: over the same rows and in the same workspace,
        with its K and its mode."""
        other = copy(self)
        other.size = SelectionSize(
            self.size.topk if rule.index_topk is None else rule.index_topk,
            self.size.workspace_bytes,
        )
        other.mode = rule.mode
        return other

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

    def _select(self, part: Part, *, is_extend: bool) -> Choice | None:
        if not self._is_sparse(part):
            return None
        watch = Watch(self.on_scores, self.on_select, self.check_selections)
        kernel = self.dense.slot_attention
        if self._scores_X is None or kernel is None or watch.looks:
            sizes = (self.size, self.page_size)
            return new_selection(part, *sizes, is_extend=is_extend, watch=watch, kernel=kernel)
        from .slot_selection import SlotSelection  # noqa: PLC0415 - as in `_score_room`

        inputs = (self.size.topk, self.storage, self._scores_X)
        return SlotSelection.of(part, *inputs, is_extend=is_extend, kernel=kernel)

    def _is_sparse(self, part: Part) -> bool:
        return len(part) > 0 and self.selects(part.longest)

    def count(self, parts: Iterable[Sequence[int]]) -> None:
        """Note the keys of a step: the lengths of its extends and of its decodes, whether they are
        planned anew or replayed."""
        for kv_lens in parts:
            if kv_lens and self.selects(max(kv_lens)):
                self.clock.count_keys(kv_lens, self.size.topk)

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

    def _attend(self, layer: MlaLayer, q: Query, choice: Choice) -> Tensor:
        q.require(choice.part.num_tokens, self.storage.dtype)
        if self.storage.index_k[layer.index] is None:
            if choice.scored_in is None:
                raise ValueError(
                    f"layer {layer.index} keeps no index keys and no layer before it chose"
                )
        elif q.index is None:
            raise ValueError(
                f"the plan selects in layer {layer.index}, but the query has no index part"
            )
        else:
            with self.clock.timing():
                choice.score(layer.index, q.index, self.storage)
        return choice.attend(layer, q, self.storage)


def _own(plan: Plan) -> DsaPlan:
    if not isinstance(plan, DsaPlan):
        raise TypeError(f"a DsaPlan is expected, got {type(plan).__name__}")
    return plan
