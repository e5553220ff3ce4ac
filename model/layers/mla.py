"""Multi-head latent attention: projections, cache rows and queries around a backend.

One fused projection, `down`, makes the query latent, the index key, the key-value latent and the
shared rotated key from the layer's input; in this order each begins with a block of an fp8 weight.
`up` makes the heads' queries from the query latent. Without a query latent `down` begins with the
heads' queries themselves. The backend decides whether to attend over latents (absorbed) or expanded
keys. Packed for a CPU, `up` may make absorbed queries itself, and those of the indexer, and `out`
may take attended latents: what costs there is the number of operations.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.base import AttentionBackend, IndexQuery, MlaLayer, Plan, Query
from ...attention.fused_write import RowNorms, fuses, write_fused
from ...kv_cache.storage import CacheStorage
from ..config import ModelConfig
from ..fp8 import BLOCK
from .fp8 import Fp8Linear
from .indexer import Indexer
from .linear import CHEAP_TO_GATHER, Allocator, Linear
from .norm import LATENT_EPS, RmsNorm
from .products import LONGEST_CHAIN, packs
from .rope import rotate_

if TYPE_CHECKING:
    from ..kernels.fp8_rows import Fp8Rows


@dataclass(frozen=True)
class Rows:
    """Where the cache rows of T tokens go, and the angles of their positions.

    angles_TR: complex [T, R / 2]. selects: queries need their index part.
    """

    storage: CacheStorage
    slots_T: Tensor
    angles_TR: Tensor
    selects: bool


@dataclass(frozen=True)
class Step:
    """What all layers of one step share."""

    plan: Plan
    backend: AttentionBackend
    rows: Rows

    def attend(self, layer: MlaLayer, q: Query, out_THV: Tensor | None = None) -> Tensor:
        """[T, H, V]: prompt chunks first, decodes after, as the batch orders them."""
        batch, backend, plan = self.plan.batch, self.backend, self.plan
        border, total = batch.num_extend_tokens, len(q.nope_THN)
        if not batch.num_decodes:
            found = (backend.prefill(layer, q, plan),)
        elif not batch.num_extends:
            found = (backend.decode(layer, q, plan),)
        else:
            extends_THV = backend.prefill(layer, q.rows(0, border), plan)
            found = (extends_THV, backend.decode(layer, q.rows(border, total), plan))
        if out_THV is None and len(found) == 1:
            return found[0]
        return torch.cat(found, out=out_THV)


class Mla:
    """One attention layer. kv_b_HXC: per head N key rows (W_UK), then V value rows (W_UV)."""

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        self.index = index
        self.config = config
        heads = config.num_heads
        self.nope_width = config.nope_dim
        self.query_width = heads * (config.nope_dim + config.rope_dim)
        self.index_start = config.q_lora_rank or self.query_width
        index_width = config.indexer.head_dim if config.indexer else 0
        self.latent_start = self.index_start + index_width
        # Half-split rows leave their blocks when they are reordered; not those of one block alone.
        in_blocks = config.rope.interleaved
        self.down = allocate.fp8_linear(
            self.index_start,
            index_width,
            config.kv_lora_rank + config.rope_dim,
            columns=config.hidden_size,
            in_blocks=in_blocks and index_width in (0, BLOCK),
        )
        self.up: Linear | Fp8Linear | None = None
        self.q_norm: RmsNorm | None = None
        if config.q_lora_rank is not None:
            self.up = allocate.fp8_linear(
                self.query_width, columns=config.q_lora_rank, in_blocks=in_blocks
            )
            self.q_norm = RmsNorm(config.q_lora_rank, LATENT_EPS, allocate)
        self.kv_norm = RmsNorm(config.kv_lora_rank, LATENT_EPS, allocate)
        self.kv_b_HXC = allocate.weight(heads, config.nope_dim + config.v_dim, config.kv_lora_rank)
        self.out = allocate.fp8_linear(config.hidden_size, columns=heads * config.v_dim)
        self.indexer = (
            Indexer(config.indexer, self.index_start, config.hidden_size, config.rope_dim, allocate)
            if config.indexer
            else None
        )
        self._joins_weights = self._joins_queries = False
        self.layer = MlaLayer(
            index=index,
            scale=config.softmax_scale,
            w_uk_HNC=self.kv_b_HXC[:, : config.nope_dim],
            w_uv_HVC=self.kv_b_HXC[:, config.nope_dim :],
        )

    def pack(self) -> None:
        """Pack the two projections, with all that can be a part of them."""
        if packs(self.down.weight_ED):
            self._join_values()
            if self.indexer is not None:
                self._join_index_weights(self.indexer)
            if isinstance(self.up, Linear):
                self._join_queries(self.up, self.indexer)
                self.up.pack()
        self.down.pack()

    def _join_values(self) -> None:
        """Where it stays small, W_UV becomes a part of `out`, which then takes attended latents."""
        heads, columns = self.config.num_heads, self.config.num_heads * self.config.kv_lora_rank
        if not isinstance(self.out, Linear) or columns > LONGEST_CHAIN:
            return
        if len(self.out.weight_ED) * columns > CHEAP_TO_GATHER:
            return
        w_uv_HVC = self.layer.w_uv_HVC
        out_EHV = self.out.weight_ED.unflatten(1, (heads, -1)).double()
        joined_EHC = torch.einsum("ehv,hvc->ehc", out_EHV, w_uv_HVC.double())
        self.out.weight_ED = joined_EHC.flatten(1).to(self.out.weight_ED.dtype)
        self.layer = replace(self.layer, w_uv_HVC=w_uv_HVC[:, :0])

    def _join_index_weights(self, indexer: Indexer) -> None:
        """Head weights of the indexer, scaled, become rows of `down`."""
        joined_ED = torch.cat((self.down.weight_ED, indexer.weights_nD * indexer.scale))
        # Rotated pairs are read as complex numbers, which needs rows of even length.
        self.down.weight_ED = F.pad(joined_ED, (0, 0, 0, len(joined_ED) % 2))
        indexer.weights_nD = indexer.weights_nD.new_empty(0)
        self._joins_weights = True

    def _join_queries(self, up: Linear, indexer: Indexer | None) -> None:
        """W_UK and the softmax scale become a part of `up` where that is no more arithmetic, the
        index queries where the product stays small enough to be no loss in steps without them."""
        config, columns = self.config, up.weight_ED.shape[1]
        if columns * config.kv_lora_rank <= (columns + config.kv_lora_rank) * config.nope_dim:
            self._absorb(up)
        if indexer is None:
            return
        if up.weight_ED.numel() + indexer.up.weight_ED.numel() <= CHEAP_TO_GATHER:
            up.weight_ED = torch.cat((up.weight_ED, indexer.up.release()))
            self._joins_queries = True

    def _absorb(self, up: Linear) -> None:
        """`up` makes scaled queries against latents: for each head C rows and R rows."""
        layer, nope, latent = self.layer, self.config.nope_dim, self.config.kv_lora_rank
        heads_HXQ = up.weight_ED.unflatten(0, (self.config.num_heads, -1)).double()
        latent_HCQ = layer.w_uk_HNC.double().transpose(1, 2) @ heads_HXQ[:, :nope]
        absorbed_HXQ = torch.cat((latent_HCQ, heads_HXQ[:, nope:]), dim=1) * layer.scale
        up.weight_ED = absorbed_HXQ.flatten(0, 1).to(up.weight_ED.dtype)
        self.nope_width, self.query_width = latent, len(up.weight_ED)
        self.kv_b_HXC = layer.w_uv_HVC.contiguous()
        no_keys_HNC = self.kv_b_HXC[:, :0]
        self.layer = replace(layer, scale=1.0, w_uk_HNC=no_keys_HNC, w_uv_HVC=self.kv_b_HXC)

    @property
    def takes_fp8(self) -> bool:
        return isinstance(self.down, Fp8Linear)

    def queries(self, rows: Rows, x_TD: Tensor, fp8: "Fp8Rows | None" = None) -> Query:
        """What T tokens ask; their cache rows are written.

        fp8: x in fp8, where the first product takes it so and it was made already.
        """
        if fp8 is not None and isinstance(self.down, Fp8Linear):
            down_TE = self.down.multiply(fp8, x_TD.dtype)
        else:
            down_TE = self.down(x_TD)
        self._write_rows(down_TE, rows)
        return self._query(x_TD, down_TE, rows)

    def write(self, rows: Rows, x_TD: Tensor) -> None:
        """Only the cache rows of T tokens, for a layer whose output nobody reads."""
        self._write_rows(self.down(x_TD), rows)

    def _write_rows(self, down_TE: Tensor, rows: Rows) -> None:
        storage, slots_T = rows.storage, rows.slots_T
        if fuses(storage):
            index_norm = self.indexer.key_norm if self.indexer else None
            norms = RowNorms(
                self.kv_norm.weight_D,
                (index_norm.weight_D, index_norm.bias_D) if index_norm else None,
                LATENT_EPS,
            )
            projected_TE = down_TE[:, self.index_start :]
            write_fused(storage, self.index, projected_TE, rows.angles_TR, slots_T, norms)
            return
        latent, rope = self.config.kv_lora_rank, self.config.rope_dim
        row_TX = down_TE.narrow(1, self.latent_start, latent + rope)
        self.kv_norm.norm_(row_TX.narrow(1, 0, latent))
        rotate_(row_TX.narrow(1, latent, rope), rows.angles_TR)
        storage.write_latent(self.index, slots_T, row_TX)
        if self.indexer is not None:
            first, width = self.index_start, self.indexer.indexer.head_dim
            keys_TD = self.indexer.keys(down_TE.narrow(1, first, width), rows.angles_TR)
            storage.write_index(self.index, slots_T, keys_TD)

    def _query(self, x_TD: Tensor, down_TE: Tensor, rows: Rows) -> Query:
        config = self.config
        q_TE, indexer, index = down_TE.narrow(1, 0, self.index_start), None, None
        latent_TQ = q_TE
        if self.q_norm is not None and self.up is not None:
            if isinstance(self.up, Fp8Linear):
                latent_TQ, fp8_rows = self.q_norm.in_fp8(q_TE, None)
                q_TE = self.up.multiply(fp8_rows, latent_TQ.dtype)
            else:
                latent_TQ = self.q_norm(q_TE)
                q_TE = self.up(latent_TQ)
            indexer = self.indexer if rows.selects else None
        heads_TE = q_TE.narrow(1, 0, self.query_width) if self._joins_queries else q_TE
        q_THX = heads_TE.view(-1, config.num_heads, self.nope_width + config.rope_dim)
        nope_THN, rope_THR = q_THX.split_with_sizes((self.nope_width, config.rope_dim), 2)
        if rope_THR.is_cuda:
            return Query(nope_THN, rope_THR, _finish(rope_THR, rows, indexer, x_TD, latent_TQ))
        rotate_(rope_THR, rows.angles_TR.unsqueeze(1))
        if indexer is not None:
            if self._joins_queries:
                heads_TE = q_TE.narrow(1, self.query_width, q_TE.shape[1] - self.query_width)
            else:
                heads_TE = indexer.up(latent_TQ)
            weights_Tn = self._index_weights(indexer, x_TD, down_TE)
            index = indexer.queries(heads_TE, weights_Tn, rows.angles_TR)
        if not self.layer.w_uk_HNC.shape[1]:
            return Query(q_THX, rope_THR.narrow(2, 0, 0), index)
        return Query(nope_THN, rope_THR, index)

    def _index_weights(self, indexer: Indexer, x_TD: Tensor, down_TE: Tensor) -> Tensor:
        if not self._joins_weights:
            return indexer.weights(x_TD) * indexer.scale
        end = self.latent_start + self.config.kv_lora_rank + self.config.rope_dim
        return down_TE.narrow(1, end, indexer.indexer.num_heads)


def _finish(
    rope_THR: Tensor, rows: Rows, indexer: Indexer | None, x_TD: Tensor, latent_TQ: Tensor
) -> IndexQuery | None:
    """Rotate in place by a kernel, and make the index queries where a part selects."""
    from ..kernels.gate import fp32_product  # noqa: PLC0415 - only where triton is installed
    from ..kernels.queries import (  # noqa: PLC0415 - the same
        IndexParts,
        finish_queries,
        rotate_queries,
    )

    if indexer is None:
        rotate_queries(rope_THR, rows.angles_TR)
        return None
    weights_STn = fp32_product(x_TD, indexer.weights_nD)
    q_TnD = indexer.heads(indexer.up(latent_TQ))
    parts = IndexParts(q_TnD, weights_STn, indexer.scale)
    return IndexQuery(parts.q_TnD, finish_queries(rope_THR, rows.angles_TR, parts))
