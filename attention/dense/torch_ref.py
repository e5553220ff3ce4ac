"""Dense attention in plain torch: any device, any page size, every visible token.

Decode and verify work on absorbed queries over latent rows; prompt chunks on expanded keys and
values, over pieces of the prefix whose results are merged by their log-sum-exp.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import MlaLayer, Plan, Query
from ..groups import DecodeGroup, group_decodes, over_groups, request_slots
from ..kernels.reference import (
    absorbed_query,
    expanded_attention,
    latent_attention,
    merge,
    unabsorb,
)
from ..metadata import AttentionBatch

# Keys of a decode group: bounds its gathered rows.
KEYS_IN_GROUP = 1 << 17
# Keys expanded at once: bounds the scores of a chunk of T rows to T * KEYS_AT_ONCE per head.
KEYS_AT_ONCE = 2048


@dataclass(frozen=True)
class TorchPlan:
    """Slots of every request, made once for all layers, and only for the parts there are."""

    batch: AttentionBatch
    page_size: int
    selects: bool = False

    @cached_property
    def groups(self) -> list[DecodeGroup]:
        return group_decodes(self.batch, self.page_size, KEYS_IN_GROUP)

    @cached_property
    def extend_slots(self) -> list[Tensor]:
        requests = range(self.batch.num_extends)
        return [request_slots(self.batch, r, self.page_size) for r in requests]


class TorchDenseBackend:
    """See `base.AttentionBackend`."""

    name = "torch"

    def __init__(self, storage: CacheStorage) -> None:
        self.storage = storage
        self.page_size = storage.page_size

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> TorchPlan:
        if out is not None:
            raise ValueError("plans of the torch backend follow the lengths and are made anew")
        return TorchPlan(batch, self.page_size)

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        out_THC = over_groups(
            plan.groups, q_THX, lambda group, rows: self._decode_group(layer, group, rows)
        )
        return unabsorb(out_THC, layer.w_uv_HVC)

    def _decode_group(self, layer: MlaLayer, group: DecodeGroup, q_GwHX: Tensor) -> Tensor:
        size, width, heads, _ = q_GwHX.shape
        rows_GLX = self.storage.latent_rows(layer.index, group.slots_GL)
        counts = group.visible
        if counts is not None:
            counts = counts.repeat_interleave(heads, dim=1)
        latent_width = layer.w_uk_HNC.shape[2]
        out = latent_attention(q_GwHX.flatten(1, 2), rows_GLX, counts, latent_width)
        return out.view(size * width, heads, latent_width)

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        outputs, start = [], 0
        for request, slots_L in enumerate(plan.extend_slots):
            stop = start + plan.batch.query_lens[request]
            context = plan.batch.context_lens[request]
            outputs.append(self._prefill_one(layer, q.rows(start, stop), slots_L, context))
            start = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _prefill_one(self, layer: MlaLayer, q: Query, slots_L: Tensor, context: int) -> Tensor:
        q_HTX = (torch.cat((q.nope_THN, q.rope_THR), dim=-1) * layer.scale).transpose(0, 1)
        visible_T = torch.arange(context + 1, len(slots_L) + 1, device=slots_L.device)
        out = lse = None
        for first in range(0, len(slots_L), KEYS_AT_ONCE):
            piece = slots_L[first : first + KEYS_AT_ONCE]
            k_HLX, v_HLV = self._expand(layer, piece)
            hidden = first + len(piece) > context + 1
            part = expanded_attention(q_HTX, k_HLX, v_HLV, visible_T - first if hidden else None)
            out, lse = part if out is None or lse is None else merge(out, lse, *part)
        assert out is not None
        return out.transpose(0, 1)

    def _expand(self, layer: MlaLayer, slots_L: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [H, L, N + R] and values [H, L, V] of cached rows."""
        rows_LX = self.storage.latent_rows(layer.index, slots_L)
        heads, _, latent_width = layer.w_uk_HNC.shape
        latent_HLC = rows_LX[:, :latent_width].expand(heads, -1, -1)
        nope_HLN = torch.bmm(latent_HLC, layer.w_uk_HNC.transpose(1, 2))
        rope_HLR = rows_LX[:, latent_width:].expand(heads, -1, -1)
        v_HLV = torch.bmm(latent_HLC, layer.w_uv_HVC.transpose(1, 2))
        return torch.cat((nope_HLN, rope_HLR), dim=-1), v_HLV


def _own(plan: Plan) -> TorchPlan:
    if not isinstance(plan, TorchPlan):
        raise TypeError(f"a TorchPlan is expected, got {type(plan).__name__}")
    return plan
