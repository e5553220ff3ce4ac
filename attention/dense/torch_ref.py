"""Dense attention in plain torch: any device, any page size, every visible token.

Decode and verify work on absorbed queries over latent rows; prompt chunks on expanded keys and
values, over pieces of the prefix whose results are merged by their log-sum-exp.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import MlaLayer, Plan, Query
from ..kernels.reference import (
    absorbed_query,
    expanded_attention,
    latent_attention,
    merge,
    unabsorb,
)
from ..metadata import AttentionBatch
from ..slots import RequestSlots
from ..tiles import Tile, Workspace, decode_tiles

# Small enough that what one operation writes is still in the processor's cache for the next.
WORKSPACE_BYTES = 4 << 20


@dataclass
class TorchPlan:
    """Slots of the requests, made for the parts that are asked for and shared by all layers.

    A refreshed plan keeps its tensors; the tiles that cut them up live on the host.
    """

    batch: AttentionBatch
    page_size: int
    extend_slots: RequestSlots | None = None
    decode_slots: RequestSlots | None = None
    decode_tiles: list[Tile] = field(default_factory=list)

    @property
    def selects(self) -> bool:
        return False

    def refresh(self, batch: AttentionBatch) -> None:
        """Take another batch of the same shape; raises ValueError for another one."""
        self.batch.require_same_shape(batch)
        self.batch = batch
        self.decode_tiles = []
        if self.decode_slots is not None:
            self.decode_slots.refresh(batch.decodes)

    def slots_of_extends(self) -> RequestSlots:
        if self.extend_slots is None:
            self.extend_slots = RequestSlots(self.batch.extends, self.page_size)
        return self.extend_slots

    def tiles_of_decodes(self, workspace: Workspace) -> list[Tile]:
        part = self.batch.decodes
        if self.decode_slots is None:
            self.decode_slots = RequestSlots(part, self.page_size)
        if not self.decode_tiles:
            self.decode_tiles = decode_tiles(part, self.decode_slots, workspace)
        return self.decode_tiles


class TorchDenseBackend:
    """See `base.AttentionBackend`.

    workspace_bytes bounds, in a decode, the copied rows and the scores of a tile; in a prefill the
    expanded keys and values (one half) and the scores (the other half), down to one key or query.
    """

    name = "torch"
    slot_attention = None

    def __init__(self, storage: CacheStorage, *, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.storage = storage
        self.page_size = storage.page_size
        self.workspace_bytes = workspace_bytes

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> TorchPlan:
        if out is None:
            return TorchPlan(batch, self.page_size)
        plan = _own(out)
        plan.refresh(batch)
        return plan

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        q.require(plan.batch.decodes.num_tokens, self.storage.dtype)
        if not len(q.nope_THN):
            return q.nope_THN.new_empty(0, *layer.w_uv_HVC.shape[:2])
        q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        heads, _, latent_width = layer.w_uk_HNC.shape
        workspace = Workspace(self.workspace_bytes // 4, q_THX.shape[2], heads)
        tiles = plan.tiles_of_decodes(workspace)
        if len(tiles) == 1:
            return unabsorb(self._attend(layer, q_THX, tiles[0]), layer.w_uv_HVC)
        out_THC = q_THX.new_empty(len(q_THX), heads, latent_width)
        for tile in tiles:
            out_THC[tile.tokens] = self._attend(layer, q_THX, tile)
        return unabsorb(out_THC, layer.w_uv_HVC)

    def _attend(self, layer: MlaLayer, q_THX: Tensor, tile: Tile) -> Tensor:
        """Attended latents [G * w, H, C] of a tile's queries."""
        heads, _, latent_width = layer.w_uk_HNC.shape
        pieces = tile.read(lambda slots: self.storage.latent_rows(layer.index, slots))
        rows_GLX = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        hidden = tile.hidden_TX
        if hidden is not None:
            shape = (tile.num_requests, tile.width, heads, hidden.shape[1])
            hidden = hidden.view(shape[0], shape[1], 1, shape[3])
            hidden = hidden[:, 0] if tile.width == 1 else hidden.expand(shape).flatten(1, 2)
        q_GXX = tile.take(q_THX).flatten(1, 2)
        out_GXC = latent_attention(q_GXX, rows_GLX, hidden, latent_width)
        return tile.clear_(out_GXC.view(-1, heads, latent_width))

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        plan = _own(plan)
        part = plan.batch.extends
        q.require(part.num_tokens, self.storage.dtype)
        slots = plan.slots_of_extends()
        q_HTX = (torch.cat((q.nope_THN, q.rope_THR), dim=-1) * layer.scale).transpose(0, 1)
        out_THV = q_HTX.new_empty(part.num_tokens, *layer.w_uv_HVC.shape[:2])
        for request, length in enumerate(part.kv_lens):
            start, count = part.starts[request], part.query_lens[request]
            own_HTX = q_HTX[:, start : start + count]
            pieces = [
                self.storage.latent_rows(layer.index, piece)
                for piece in slots.pieces(request, length)
            ]
            rows_LX = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            out = self._prefill_one(layer, own_HTX, rows_LX)
            out_THV[start : start + count] = out.transpose(0, 1)
        return out_THV

    def _prefill_one(self, layer: MlaLayer, q_HTX: Tensor, rows_LX: Tensor) -> Tensor:
        """Attention [H, T, V] of the last T of the tokens in rows_LX, piece by piece."""
        heads, queries, width = q_HTX.shape
        length = len(rows_LX)
        context = length - queries
        v_width = layer.w_uv_HVC.shape[1]
        half = self.workspace_bytes // 8
        keys = min(length, max(1, half // (heads * (width + v_width))))
        step = max(1, half // (heads * keys))
        out_HTV = q_HTX.new_zeros(heads, queries, v_width, dtype=torch.float32)
        lse_HT = out_HTV.new_full((heads, queries), float("-inf"))
        visible_T = torch.arange(context + 1, length + 1, device=q_HTX.device)
        for first in range(0, length, keys):
            k_HLX, v_HLV = _expand(layer, rows_LX[first : first + keys])
            # Queries before context + j = first see nothing of this piece.
            for row in range(max(0, first - context), queries, step):
                own = slice(row, row + step)
                seen = context + row + step - first
                part = expanded_attention(
                    q_HTX[:, own], k_HLX[:, :seen], v_HLV[:, :seen], visible_T[own] - first
                )
                if first:
                    part = merge(out_HTV[:, own], lse_HT[:, own], *part)
                out_HTV[:, own], lse_HT[:, own] = part
        return out_HTV


def _expand(layer: MlaLayer, rows_LX: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [H, L, N + R] and values [H, L, V] of cached rows."""
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
