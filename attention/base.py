"""The contract between the model and an attention backend.

The model hands over queries that are not absorbed yet; a backend chooses the form it computes in
(expanded for long prompts, absorbed for decode and sparse rows) and returns per-head values. New
rows are in the cache before a backend is called: backends only read it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .metadata import AttentionBatch


@dataclass(frozen=True)
class MlaLayer:
    """What a backend needs to know of one attention layer.

    `w_uk_HNC` and `w_uv_HVC` are the two halves of `kv_b_proj`, head-major. `scale` multiplies
    q.k before the softmax (YaRN's correction included) and is the same in both forms. Where W_UK
    and the scale are a part of the model's own projection, N is 0: queries come absorbed. Where
    W_UV is a part of the projection behind attention, V is 0: attended latents are returned as they
    are, [T, H, C].
    """

    index: int
    scale: float
    w_uk_HNC: Tensor
    w_uv_HVC: Tensor


@dataclass(frozen=True)
class IndexQuery:
    """The lightning indexer's side of a query: score(t) = sum_n w_n * relu(q_n . k_t).

    All constant scales (head count, width) are already folded into `weights_Tn` (fp32).
    """

    q_TnD: Tensor
    weights_Tn: Tensor


@dataclass(frozen=True)
class Query:
    """Queries of T consecutive tokens of a step; the rope part is rotated.

    Absorbed queries stand whole in nope_THN, C + R elements with the softmax scale, and rope_THR is
    empty.
    """

    nope_THN: Tensor
    rope_THR: Tensor
    index: IndexQuery | None = None

    def require(self, num_tokens: int, dtype: torch.dtype) -> None:
        """Raise ValueError or TypeError unless the query has these tokens and the cache's dtype."""
        heads = self.nope_THN.shape[1]
        shapes = [tuple(t.shape[:2]) for t in (self.nope_THN, self.rope_THR)]
        if shapes != [(num_tokens, heads)] * 2:
            raise ValueError(
                f"the plan has {num_tokens} tokens, the query's parts have {shapes[0]} and "
                f"{shapes[1]} tokens and heads"
            )
        if self.index and [len(self.index.q_TnD), len(self.index.weights_Tn)] != [num_tokens] * 2:
            raise ValueError(
                f"the plan has {num_tokens} tokens, the index query has "
                f"{len(self.index.q_TnD)} and {len(self.index.weights_Tn)} rows and weights"
            )
        if self.nope_THN.dtype != dtype:
            raise TypeError(f"the query is {self.nope_THN.dtype}, the cache holds {dtype}")

    def rows(self, start: int, stop: int) -> "Query":
        """The query of tokens start..stop-1."""
        index = self.index and IndexQuery(
            self.index.q_TnD[start:stop], self.index.weights_Tn[start:stop]
        )
        return Query(self.nope_THN[start:stop], self.rope_THR[start:stop], index)


# Attention over chosen slots in place: queries, rows, slots, counts, latent width; what it returns
# is told at `kernels.reference.sparse_attention`, in the queries' dtype.
SlotAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


class Plan(Protocol):
    """A backend's schedule for one step.

    `selects` says whether any part of the step needs `Query.index`; where it is False the model
    skips computing index queries (index keys are written either way).
    """

    @property
    def batch(self) -> AttentionBatch: ...
    @property
    def selects(self) -> bool: ...


class AttentionBackend(Protocol):
    """One way to attend over the paged cache.

    slot_attention: the kernel it brings for sparse attention around it; None: it brings none.
    replayable: the device work of a decode depends on the tensors of its plan alone, so that it can
    be captured once and replayed whenever the plan was refreshed.
    """

    name: str
    page_size: int

    @property
    def replayable(self) -> bool: ...

    @property
    def slot_attention(self) -> SlotAttention | None: ...

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> Plan:
        """Schedule one step; with `out`, refresh that plan's buffers in place.

        Raises ValueError when `out` has other shapes than the batch needs.
        """
        ...

    def selects(self, longest: int) -> bool:
        """Whether a plan selects in a part whose longest request has so many tokens."""
        ...

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        """Attention of the extend part: q of its tokens in batch order, returns [T, H, V]."""
        ...

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        """Attention of the decode part: q of [B * w] tokens, returns [B * w, H, V]."""
        ...
