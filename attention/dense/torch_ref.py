"""Dense attention in plain torch: any device, any page size, every visible token.

Every token, decoded or in a prompt chunk, is computed in the one absorbed form over latent rows:
its bits on a CPU are then the same in either. For a chunk this is more arithmetic than expanding
keys and values would be (1.7 times for tiny-dsa, 3.4 times for DeepSeek-V3's widths).
"""

from dataclasses import dataclass, field

from torch import Tensor

from ...kv_cache.storage import CacheStorage
from ..base import MlaLayer, Plan, Query
from ..cached_rows import latent_rows
from ..kernels.reference import BLOCK, absorbed_query, latent_attention, unabsorb
from ..metadata import AttentionBatch, Part
from ..slots import RequestSlots
from ..tiles import Tile, Workspace, decode_tiles, extend_tiles

# Small enough that what one operation writes is still in the processor's cache for the next.
WORKSPACE_BYTES = 4 << 20


@dataclass
class TiledPart:
    """The tiles of a part, cut when the first layer asks for them and shared by all layers."""

    part: Part
    page_size: int
    is_extend: bool
    slots: RequestSlots | None = None
    tiles: list[Tile] = field(default_factory=list)

    def refresh(self, part: Part) -> None:
        """Take another part of the same shape; the slots keep their tensor."""
        self.part, self.tiles = part, []
        if self.slots is not None:
            self.slots.refresh(part)

    def cut(self, workspace: Workspace) -> list[Tile]:
        if self.slots is None:
            self.slots = RequestSlots(self.part, self.page_size)
        if not self.tiles:
            self.tiles = self._cut(self.slots, workspace)
        return self.tiles

    def _cut(self, slots: RequestSlots, workspace: Workspace) -> list[Tile]:
        if not self.is_extend:
            return decode_tiles(self.part, slots, workspace, in_blocks=True)
        return [
            tile
            for request in range(len(self.part))
            for tile in extend_tiles(self.part, request, slots, workspace, in_blocks=True)
        ]


@dataclass
class TorchPlan:
    """The two parts of a step. A refreshed plan keeps its tensors; tiles live on the host."""

    batch: AttentionBatch
    extends: TiledPart
    decodes: TiledPart

    @property
    def selects(self) -> bool:
        return False

    def refresh(self, batch: AttentionBatch) -> None:
        """Take another batch of the same shape; raises ValueError for another one."""
        self.batch.require_same_shape(batch)
        self.batch = batch
        self.decodes.refresh(batch.decodes)


class TorchDenseBackend:
    """See `base.AttentionBackend`.

    workspace_bytes bounds the copied rows and the scores of a tile, down to those of one query.
    """

    name = "torch"
    slot_attention = None
    replayable = False

    def __init__(self, storage: CacheStorage, *, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.storage = storage
        self.page_size = storage.page_size
        self.workspace_bytes = workspace_bytes

    def plan(self, batch: AttentionBatch, *, out: Plan | None = None) -> TorchPlan:
        if out is None:
            return TorchPlan(
                batch,
                TiledPart(batch.extends, self.page_size, is_extend=True),
                TiledPart(batch.decodes, self.page_size, is_extend=False),
            )
        plan = _own(out)
        plan.refresh(batch)
        return plan

    def selects(self, longest: int) -> bool:
        return False

    def prefill(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        return self._attend(layer, q, _own(plan).extends)

    def decode(self, layer: MlaLayer, q: Query, plan: Plan) -> Tensor:
        return self._attend(layer, q, _own(plan).decodes)

    def _attend(self, layer: MlaLayer, q: Query, part: TiledPart) -> Tensor:
        q.require(part.part.num_tokens, self.storage.dtype)
        heads, _, latent_width = layer.w_uk_HNC.shape
        if not len(q.nope_THN):
            return unabsorb(q.nope_THN.new_empty(0, heads, latent_width), layer.w_uv_HVC)
        q_THX = absorbed_query(q.nope_THN, q.rope_THR, layer.w_uk_HNC, layer.scale)
        # A query's scores, their softmax, and a sum for each block of its keys.
        per_query = heads * (2 + -(-latent_width // BLOCK))
        tiles = part.cut(Workspace(self.workspace_bytes // 4, q_THX.shape[2], per_query))
        if len(tiles) == 1:
            return unabsorb(self._attend_tile(layer, q_THX, tiles[0]), layer.w_uv_HVC)
        out_THC = q_THX.new_empty(len(q_THX), heads, latent_width)
        for tile in tiles:
            out_THC[tile.tokens] = self._attend_tile(layer, q_THX, tile)
        return unabsorb(out_THC, layer.w_uv_HVC)

    def _attend_tile(self, layer: MlaLayer, q_THX: Tensor, tile: Tile) -> Tensor:
        """Attended latents [G * w, H, C] of a tile's queries."""
        heads, _, latent_width = layer.w_uk_HNC.shape
        [rows_GLX] = tile.read(lambda slots: latent_rows(self.storage, layer.index, slots))
        hidden = tile.hidden_TX
        if hidden is not None:
            hidden = hidden.view(tile.num_requests, tile.width, -1)
        q_GXX = tile.take(q_THX).flatten(1, 2)
        out_GXC = latent_attention(q_GXX, rows_GLX, hidden, latent_width)
        return tile.clear_(out_GXC.reshape(-1, heads, latent_width))


def _own(plan: Plan) -> TorchPlan:
    if not isinstance(plan, TorchPlan):
        raise TypeError(f"a TorchPlan is expected, got {type(plan).__name__}")
    return plan
