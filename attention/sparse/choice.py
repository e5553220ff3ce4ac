"""What the two ways to select have in common: plain torch's (`selection.py`) and the kernels'.

A choice is made for the extends or for the decodes of a step when the step is planned. A layer with
index keys of its own scores, the layers behind it that have none attend to the same tokens.
"""

from typing import Protocol

from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import IndexQuery, MlaLayer, Query, SlotAttention
from ..metadata import Part


class Choice(Protocol):
    """What each query of a part attends to. scored_in: the layer whose index keys chose, None
    before any has."""

    part: Part
    scored_in: int | None

    def refresh(self, part: Part) -> None:
        """Take another part of the same shape, keeping every tensor."""
        ...

    def score(self, layer: int, query: IndexQuery, storage: CacheStorage) -> None:
        """Select anew by the index keys of a layer."""
        ...

    def attend(self, layer: MlaLayer, q: Query, storage: CacheStorage) -> Tensor:
        """Attention [T, H, V] of the part's queries over what was selected."""
        ...


def attend_in_place(
    kernel: SlotAttention,
    layer: MlaLayer,
    q: Query,
    rows_SX: Tensor,
    chosen: tuple[Tensor, Tensor],
) -> Tensor:
    """Attention [T, H, V] by a kernel that reads rows where they lie.

    chosen: slots [T, K] in rows_SX and how many keys each query sees.
    """
    from ..kernels.absorb import (  # noqa: PLC0415 - only where triton is installed
        absorb_queries,
        unabsorb_latents,
    )

    q_THX = absorb_queries(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
    out_THC, _ = kernel(q_THX, rows_SX, *chosen, layer.w_uk_HNC.shape[2])
    return unabsorb_latents(out_THC, layer.w_uv_HVC)
