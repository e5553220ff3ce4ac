"""Dense attention in Triton kernels, for CUDA: split-KV decode and verify, ragged prefill.

Decode and verify attend over latent rows in place, the keys of long requests shared out among the
multiprocessors. Prompt chunks attend over keys and values that are expanded round by round, so a
long cached prefix costs a bounded amount of memory.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import MlaLayer, Plan, Query
from ..cached_rows import latent_rows
from ..kernels.absorb import absorb_queries, unabsorb_latents
from ..kernels.mla_decode import DecodeParts, decode_tiling, mla_decode
from ..kernels.mla_prefill import ExpandedKeys, PrefillRound, mla_prefill, prefill_rounds
from ..kernels.sparse_mla import sparse_mla
from ..metadata import AttentionBatch
from ..slots import RequestSlots
from ..workspace import EXPANDED_BYTES


@dataclass
class TritonPlan:
    """Who works on what, made for the parts that are asked for and shared by all layers.

    A refreshed plan keeps its tensors, the block table's copy among them.
    """

    batch: AttentionBatch
    page_size: int
    block_table_BP: Tensor
    decode_parts: DecodeParts | None = None
    rounds: list[PrefillRound] = field(default_factory=list)

    @property
    def selects(self) -> bool:
        return False

    def refresh(self, batch: AttentionBatch) -> None:
        """Take another batch of the same shape; raises ValueError for another one."""
        self.batch.require_same_shape(batch)
        self.batch = batch
        self.block_table_BP.copy_(batch.block_table_BP)
        if self.decode_parts is not None:
            self.decode_parts.refresh(batch.decodes.kv_lens)

    def parts_of_decodes(self, heads: int, rows_SX: Tensor, latent_width: int) -> DecodeParts:
        if self.decode_parts is None:
            rows, device = self.batch.decode_width * heads, self.block_table_BP.device
            tiling = decode_tiling(rows, rows_SX, latent_width)
            self.decode_parts = DecodeParts.of(self.batch.decodes.kv_lens, rows, tiling, device)
        return self.decode_parts

    def rounds_of_extends(self, keys_at_once: int) -> list[PrefillRound]:
        if not self.rounds:
            part = self.batch.extends
            slots = RequestSlots(part, self.page_size)
            self.rounds = prefill_rounds(part, slots.table_BL, keys_at_once)
        return self.rounds


class TritonDenseBackend:
    """See `base.AttentionBackend`.

    workspace_bytes bounds the expanded keys and values of a prefill's round, down to one key.
    """

    name = "triton"
    slot_attention = staticmethod(sparse_mla)
    replayable = True

    def __init__(self, storage: CacheStorage, *, workspace_bytes: int = EXPANDED_BYTES) -> None:
        self.storage = storage
        self.page_size = storage.page_size
        self.workspace_bytes = workspace_bytes

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> TritonPlan:
        if out is None:
            return TritonPlan(batch, self.page_size, batch.block_table_BP.clone())
        plan = _own(out)
        plan.refresh(batch)
        return plan

    def selects(self, longest: int) -> bool:
        return False

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        q.require(plan.batch.decodes.num_tokens, self.storage.dtype)
        heads, _, latent_width = layer.w_uk_HNC.shape
        if not len(q.nope_THN):
            return q.nope_THN.new_empty(0, heads, layer.w_uv_HVC.shape[1])
        q_THX = absorb_queries(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        rows_SX = self.storage.latent_rows(layer.index, slice(None))
        parts = plan.parts_of_decodes(heads, rows_SX, latent_width)
        table_BP = plan.block_table_BP[plan.batch.num_extends :]
        out_THC, _ = mla_decode(q_THX, rows_SX, table_BP, self.page_size, parts, latent_width)
        return unabsorb_latents(out_THC, layer.w_uv_HVC)

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        part = plan.batch.extends
        q.require(part.num_tokens, self.storage.dtype)
        heads, v_width, _ = layer.w_uv_HVC.shape
        per_key = heads * (layer.w_uk_HNC.shape[1] + v_width) * q.nope_THN.element_size()
        rounds = plan.rounds_of_extends(self.workspace_bytes // per_key)
        # Between rounds a result is not rounded; a padding request is in none of them.
        dtype = q.nope_THN.dtype if len(rounds) == 1 else torch.float32
        shape = (part.num_tokens, heads, v_width)
        out_THV = q.nope_THN.new_zeros(shape, dtype=dtype)
        lse_TH = out_THV.new_empty(shape[:2], dtype=torch.float32)
        for work in rounds:
            keys = self._expand(layer, work.slots_L)
            mla_prefill(q.nope_THN, q.rope_THR, keys, work.blocks_X6, layer.scale, out_THV, lse_TH)
        return out_THV.to(q.nope_THN.dtype)

    def _expand(self, layer: MlaLayer, slots_L: Tensor) -> ExpandedKeys:
        rows_LX = latent_rows(self.storage, layer.index, slots_L)
        heads, _, latent_width = layer.w_uk_HNC.shape
        latent_HLC = rows_LX[:, :latent_width].expand(heads, -1, -1)
        return ExpandedKeys(
            torch.bmm(latent_HLC, layer.w_uk_HNC.transpose(1, 2)),
            rows_LX[:, latent_width:],
            torch.bmm(latent_HLC, layer.w_uv_HVC.transpose(1, 2)),
        )


def _own(plan: Plan) -> TritonPlan:
    if not isinstance(plan, TritonPlan):
        raise TypeError(f"a TritonPlan is expected, got {type(plan).__name__}")
    return plan
