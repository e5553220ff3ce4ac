"""The one table from Hugging Face tensor names to the places of our weights.

Fused projections, stacked experts and reordered rows are all written down here: an entry says
which view of which weight a tensor of the checkpoint fills. Built from a model on the `meta`
device, the same table tells which tensors with which shapes a checkpoint must hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig, MoeConfig
from .deepseek import DeepseekModel
from .layers.decoder import DecoderLayer
from .layers.indexer import Indexer
from .layers.linear import Allocator
from .layers.mla import Mla
from .layers.mlp import Mlp
from .layers.moe import Moe
from .layers.mtp import MtpLayer
from .layers.rope import half_split_rows


@dataclass(frozen=True)
class Slice:
    """Where one tensor of a checkpoint goes.

    shape: its shape in the file. target: the view of our weight it fills, element by element in the
    file's order. rows: if given, row i of the weight is row rows[i] of the file.
    """

    shape: tuple[int, ...]
    target: Tensor
    rows: tuple[int, ...] | None = None

    def fill(self, source: Tensor) -> None:
        """Copy a tensor of the file, converting dtype and device."""
        if self.rows is not None:
            source = source[list(self.rows)]
        self.target.copy_(source.reshape(self.target.shape))


Entry = tuple[str, Slice]


def name_table(model: DeepseekModel) -> dict[str, Slice]:
    """Every tensor a checkpoint of this model must hold."""
    table = dict(
        [
            _whole("model.embed_tokens.weight", model.embedding.weight_VD),
            _whole("model.norm.weight", model.norm.weight_D),
        ]
    )
    if not model.config.tie_word_embeddings:
        table.update([_whole("lm_head.weight", model.head.linear.weight_ED)])
    for index, layer in enumerate(model.layers):
        table.update(_layer(f"model.layers.{index}.", layer, model.config))
    if model.mtp is not None:
        table.update(_mtp(f"model.layers.{model.config.num_layers}.", model.mtp, model.config))
    return table


def unused_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint may hold and this model does not read.

    Those are multi-token-prediction layers where they are not asked for (one is recognised even if
    the configuration says there is none), their copies of embedding and head, the copy of a tied
    head, and rope tables that old checkpoints carry along.
    """
    first = config.num_layers
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(first, first + max(1, config.num_mtp_layers)):
        shapes |= mtp_shapes(config, index)
    for index in range(first):
        shapes[f"model.layers.{index}.self_attn.rotary_emb.inv_freq"] = (config.rope_dim // 2,)
    if config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def mtp_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of an MTP layer, with the copies of embedding and head that some carry."""
    prefix = f"model.layers.{index}."
    layer = MtpLayer(config, Allocator(torch.float32, torch.device("meta")))
    table = (config.vocab_size, config.hidden_size)
    return {name: entry.shape for name, entry in _mtp(prefix, layer, config)} | {
        f"{prefix}shared_head.head.weight": table,
        f"{prefix}embed_tokens.weight": table,
    }


def _whole(name: str, target: Tensor, rows: list[int] | None = None) -> Entry:
    return name, Slice(tuple(target.shape), target, None if rows is None else tuple(rows))


def _mtp(prefix: str, mtp: MtpLayer, config: ModelConfig) -> Iterator[Entry]:
    yield _whole(f"{prefix}enorm.weight", mtp.token_norm.weight_D)
    yield _whole(f"{prefix}hnorm.weight", mtp.hidden_norm.weight_D)
    yield _whole(f"{prefix}eh_proj.weight", mtp.join.weight_ED)
    yield _whole(f"{prefix}shared_head.norm.weight", mtp.norm.weight_D)
    yield from _layer(prefix, mtp.layer, config)


def _layer(prefix: str, layer: DecoderLayer, config: ModelConfig) -> Iterator[Entry]:
    yield _whole(f"{prefix}input_layernorm.weight", layer.attention_norm.weight_D)
    yield _whole(f"{prefix}post_attention_layernorm.weight", layer.feed_forward_norm.weight_D)
    yield from _attention(f"{prefix}self_attn.", layer.attention, config)
    if isinstance(layer.feed_forward, Moe):
        yield from _moe(f"{prefix}mlp.", layer.feed_forward)
    else:
        yield from _mlp(f"{prefix}mlp.", layer.feed_forward)


def _attention(prefix: str, mla: Mla, config: ModelConfig) -> Iterator[Entry]:
    latent, rope_dim, query = config.kv_lora_rank, config.rope_dim, mla.query_width
    latent_end = mla.latent_start + latent + rope_dim
    query_rows = kv_rows = None
    if not config.rope.interleaved:
        head = half_split_rows(config.nope_dim + rope_dim, rope_dim, start=config.nope_dim)
        query_rows = _each_head(head, config.num_heads)
        kv_rows = half_split_rows(latent + rope_dim, rope_dim, start=latent)
    if mla.q_norm is None or mla.up is None:
        yield _whole(f"{prefix}q_proj.weight", mla.down.weight_ED[:query], query_rows)
    else:
        yield _whole(f"{prefix}q_a_proj.weight", mla.down.weight_ED[: mla.latent_start])
        yield _whole(f"{prefix}q_a_layernorm.weight", mla.q_norm.weight_D)
        yield _whole(f"{prefix}q_b_proj.weight", mla.up.weight_ED, query_rows)
    rows_ED = mla.down.weight_ED[mla.latent_start : latent_end]
    yield _whole(f"{prefix}kv_a_proj_with_mqa.weight", rows_ED, kv_rows)
    yield _whole(f"{prefix}kv_a_layernorm.weight", mla.kv_norm.weight_D)
    yield _whole(f"{prefix}kv_b_proj.weight", mla.kv_b_HXC.flatten(0, 1))
    yield _whole(f"{prefix}o_proj.weight", mla.out.weight_ED)
    if mla.indexer is not None:
        yield from _indexer(f"{prefix}indexer.", mla.indexer, mla.down.weight_ED[latent_end:])


def _indexer(prefix: str, indexer: Indexer, keys_ED: Tensor) -> Iterator[Entry]:
    key_rows = query_rows = None
    if not indexer.indexer.rope_interleaved:
        key_rows = half_split_rows(indexer.indexer.head_dim, indexer.rope_dim)
        query_rows = _each_head(key_rows, indexer.indexer.num_heads)
    yield _whole(f"{prefix}wq_b.weight", indexer.up.weight_ED, query_rows)
    yield _whole(f"{prefix}wk.weight", keys_ED, key_rows)
    yield _whole(f"{prefix}k_norm.weight", indexer.key_norm.weight_D, key_rows)
    yield _whole(f"{prefix}k_norm.bias", indexer.key_norm.bias_D, key_rows)
    yield _whole(f"{prefix}weights_proj.weight", indexer.weights_nD)


def _each_head(rows: list[int], heads: int) -> list[int]:
    return [head * len(rows) + row for head in range(heads) for row in rows]


def _mlp(prefix: str, mlp: Mlp) -> Iterator[Entry]:
    gate_ED, up_ED = mlp.gate_up.weight_ED.chunk(2)
    yield _whole(f"{prefix}gate_proj.weight", gate_ED)
    yield _whole(f"{prefix}up_proj.weight", up_ED)
    yield _whole(f"{prefix}down_proj.weight", mlp.down.weight_ED)


def _moe(prefix: str, moe: Moe) -> Iterator[Entry]:
    yield _whole(f"{prefix}gate.weight", moe.gate.weight_ED)
    yield _whole(f"{prefix}gate.e_score_correction_bias", moe.gate.bias_E)
    gates_XED, ups_XED = moe.gate_up_XED.chunk(2, dim=1)
    for expert in range(moe.moe.num_experts):
        yield _whole(f"{prefix}experts.{expert}.gate_proj.weight", gates_XED[expert])
        yield _whole(f"{prefix}experts.{expert}.up_proj.weight", ups_XED[expert])
        yield _whole(f"{prefix}experts.{expert}.down_proj.weight", moe.down_XDE[expert])
    if moe.moe.num_shared:
        yield from _shared_experts(f"{prefix}shared_experts.", moe, gates_XED, ups_XED)


def _shared_experts(prefix: str, moe: Moe, gates_XED: Tensor, ups_XED: Tensor) -> Iterator[Entry]:
    """One wide block in the file, `num_shared` experts of ordinary width in memory."""
    sizes: MoeConfig = moe.moe
    hidden, width = moe.down_XDE.shape[1], sizes.num_shared * sizes.intermediate_size
    first = sizes.num_experts
    yield f"{prefix}gate_proj.weight", Slice((width, hidden), gates_XED[first:])
    yield f"{prefix}up_proj.weight", Slice((width, hidden), ups_XED[first:])
    down_DXE = moe.down_XDE[first:].transpose(0, 1)
    yield f"{prefix}down_proj.weight", Slice((hidden, width), down_DXE)
