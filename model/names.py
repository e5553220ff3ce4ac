"""The one table from Hugging Face tensor names to the places of our weights.

Fused projections, stacked experts and reordered rows are all written down here: an entry says
which view of which weight a tensor of the checkpoint fills. Built from layers on the `meta`
device, the same table tells which tensors with which shapes a checkpoint must hold.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig, MoeConfig
from .deepseek import DeepseekModel
from .fp8 import BLOCK
from .layers.decoder import DecoderLayer
from .layers.fp8 import Fp8Linear
from .layers.indexer import Indexer
from .layers.linear import Allocator, Linear
from .layers.mla import Mla
from .layers.mlp import Mlp
from .layers.moe import Moe
from .layers.mtp import MtpLayer
from .layers.rope import half_split_rows


@dataclass(frozen=True)
class Slice:
    """Where one tensor of a checkpoint goes.

    shape: its shape in the file. target: the view of our weight it fills, element by element in the
    file's order. rows: if given, the order of one head's rows: in each run of len(rows) rows, row i
    of the weight is row rows[i] of the file. scales: where the scales of its blocks go, if the
    weight stays in fp8.
    """

    shape: tuple[int, ...]
    target: Tensor
    rows: tuple[int, ...] | None = None
    scales: Tensor | None = None

    def fill(self, source: Tensor) -> None:
        """Copy a tensor of the file, converting dtype and device."""
        if self.rows is not None:
            heads_HXD = source.unflatten(0, (-1, len(self.rows)))
            source = heads_HXD[:, list(self.rows)]
        self.target.copy_(source.reshape(self.target.shape))

    def fill_scales(self, scales: Tensor) -> None:
        """Copy the block scales of an fp8 tensor of the file, fp32."""
        if self.scales is None:
            raise ValueError("the weight is not kept in fp8")
        self.scales.copy_(scales.reshape(self.scales.shape))


Entry = tuple[str, Slice]
Shape = tuple[int, ...]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def name_table(model: DeepseekModel) -> dict[str, Slice]:
    """Every tensor a checkpoint of this model must hold."""
    table = dict(
        [
            _whole(EMBEDDING, model.embedding.weight_VD),
            _whole("model.norm.weight", model.norm.weight_D),
        ]
    )
    if not model.config.tie_word_embeddings:
        table.update([_whole(HEAD, model.head.linear.weight_ED)])
    for index, layer in enumerate(model.layers):
        table.update(_layer(f"model.layers.{index}.", layer, model.config))
    if model.mtp is not None:
        table.update(_mtp(f"model.layers.{model.config.num_layers}.", model.mtp, model.config))
    return table


def needed_shapes(config: ModelConfig, *, with_mtp: bool = False) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor of `name_table`, layer by layer.

    Nothing is made before it is asked for: who stops at the first tensor that a checkpoint lacks
    has paid for what the checkpoint holds, not for what its configuration claims.
    """
    head_shape = (config.vocab_size, config.hidden_size)
    yield EMBEDDING, head_shape
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield HEAD, head_shape
    for index, dense in enumerate(config.dense_layers):
        layer = DecoderLayer(config, index, dense, Allocator(torch.float32, torch.device("meta")))
        for name, entry in _layer(f"model.layers.{index}.", layer, config):
            yield name, entry.shape
    if with_mtp:
        mtp = MtpLayer(config, Allocator(torch.float32, torch.device("meta")))
        for name, entry in _mtp(f"model.layers.{config.num_layers}.", mtp, config):
            yield name, entry.shape


def unused_shapes(config: ModelConfig, names: Iterable[str]) -> dict[str, Shape]:
    """Those of `names` that a checkpoint may hold and this model does not read.

    They belong to multi-token-prediction layers (one is recognised even if the configuration says
    there is none), are copies of embedding and head, or rope tables that old checkpoints carry
    along.
    """
    first = config.num_layers
    mtp_layers = range(first, first + max(1, config.num_mtp_layers))
    mtp: dict[str, Shape] = {}
    shapes: dict[str, Shape] = {}
    for name in names:
        index = layer_index(name)
        if name == HEAD and config.tie_word_embeddings:
            shapes[name] = (config.vocab_size, config.hidden_size)
        elif index is None:
            continue
        elif index in mtp_layers:
            mtp = mtp or mtp_shapes(config, first)
            same = name.replace(f".{index}.", f".{first}.", 1)
            shapes |= {name: mtp[same]} if same in mtp else {}
        elif index < first and name == f"model.layers.{index}.self_attn.rotary_emb.inv_freq":
            shapes[name] = (config.rope_dim // 2,)
    return shapes


def layer_index(name: str) -> int | None:
    """The layer that a tensor belongs to by its name."""
    found = re.match(r"model\.layers\.([0-9]{1,6})\.", name)
    return None if found is None else int(found[1])


def mtp_shapes(config: ModelConfig, index: int) -> dict[str, Shape]:
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


def _product(
    name: str, linear: Linear | Fp8Linear, part: slice = slice(None), rows: list[int] | None = None
) -> Entry:
    """A product's weight, or those of its rows that a tensor of the file fills."""
    target, order = linear.weight_ED[part], None if rows is None else tuple(rows)
    if isinstance(linear, Linear):
        return name, Slice(tuple(target.shape), target, order)
    first, last, _ = part.indices(len(linear.weight_ED))
    scales = linear.scales[first // BLOCK : -(-last // BLOCK)]
    return name, Slice(tuple(target.shape), target, order, scales)


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
    query_rows = kv_rows = None
    if not config.rope.interleaved:
        query_rows = half_split_rows(config.nope_dim + rope_dim, rope_dim, start=config.nope_dim)
        kv_rows = half_split_rows(latent + rope_dim, rope_dim, start=latent)
    if mla.q_norm is None or mla.up is None:
        yield _product(f"{prefix}q_proj.weight", mla.down, slice(query), query_rows)
    else:
        yield _product(f"{prefix}q_a_proj.weight", mla.down, slice(mla.index_start))
        yield _whole(f"{prefix}q_a_layernorm.weight", mla.q_norm.weight_D)
        yield _product(f"{prefix}q_b_proj.weight", mla.up, rows=query_rows)
    cached = slice(mla.latent_start, mla.latent_start + latent + rope_dim)
    yield _product(f"{prefix}kv_a_proj_with_mqa.weight", mla.down, cached, kv_rows)
    yield _whole(f"{prefix}kv_a_layernorm.weight", mla.kv_norm.weight_D)
    yield _whole(f"{prefix}kv_b_proj.weight", mla.kv_b_HXC.flatten(0, 1))
    yield _product(f"{prefix}o_proj.weight", mla.out)
    if mla.indexer is not None:
        yield from _indexer(f"{prefix}indexer.", mla.indexer, mla)


def _indexer(prefix: str, indexer: Indexer, mla: Mla) -> Iterator[Entry]:
    rows = None
    if not indexer.indexer.rope_interleaved:
        rows = half_split_rows(indexer.indexer.head_dim, indexer.rope_dim)
    yield _whole(f"{prefix}wq_b.weight", indexer.up.weight_ED, rows)
    keys = slice(mla.index_start, mla.latent_start)
    yield _product(f"{prefix}wk.weight", mla.down, keys, rows)
    yield _whole(f"{prefix}k_norm.weight", indexer.key_norm.weight_D, rows)
    yield _whole(f"{prefix}k_norm.bias", indexer.key_norm.bias_D, rows)
    yield _whole(f"{prefix}weights_proj.weight", indexer.weights_nD)


def _mlp(prefix: str, mlp: Mlp) -> Iterator[Entry]:
    middle = len(mlp.gate_up.weight_ED) // 2
    yield _product(f"{prefix}gate_proj.weight", mlp.gate_up, slice(0, middle))
    yield _product(f"{prefix}up_proj.weight", mlp.gate_up, slice(middle, 2 * middle))
    yield _product(f"{prefix}down_proj.weight", mlp.down)


def _moe(prefix: str, moe: Moe) -> Iterator[Entry]:
    yield _whole(f"{prefix}gate.weight", moe.gate.weight_ED)
    yield _whole(f"{prefix}gate.e_score_correction_bias", moe.gate.bias_E)
    gates, ups, downs = _expert_weights(moe)
    for expert in range(moe.moe.num_experts):
        yield gates.of(f"{prefix}experts.{expert}.gate_proj.weight", expert)
        yield ups.of(f"{prefix}experts.{expert}.up_proj.weight", expert)
        yield downs.of(f"{prefix}experts.{expert}.down_proj.weight", expert)
    if moe.moe.num_shared:
        yield gates.shared_rows(f"{prefix}shared_experts.gate_proj.weight", moe.moe)
        yield ups.shared_rows(f"{prefix}shared_experts.up_proj.weight", moe.moe)
        yield downs.shared_columns(f"{prefix}shared_experts.down_proj.weight", moe.moe)


@dataclass(frozen=True)
class _ExpertWeights:
    """One of the three matrices of every expert, with its scales if it stays in fp8.

    Shared experts are one wide block in the file, `num_shared` experts of ordinary width in memory.
    """

    weight_XED: Tensor
    scales_XBB: Tensor | None

    def of(self, name: str, expert: int) -> Entry:
        target = self.weight_XED[expert]
        scales = None if self.scales_XBB is None else self.scales_XBB[expert]
        return name, Slice(tuple(target.shape), target, scales=scales)

    def shared_rows(self, name: str, moe: MoeConfig) -> Entry:
        target, scales = self._shared(moe)
        _, rows, columns = target.shape
        return name, Slice((moe.num_shared * rows, columns), target, scales=scales)

    def shared_columns(self, name: str, moe: MoeConfig) -> Entry:
        target, scales = self._shared(moe)
        _, rows, columns = target.shape
        scales = None if scales is None else scales.transpose(0, 1)
        shape = (rows, moe.num_shared * columns)
        return name, Slice(shape, target.transpose(0, 1), scales=scales)

    def _shared(self, moe: MoeConfig) -> tuple[Tensor, Tensor | None]:
        first = moe.num_experts
        scales = None if self.scales_XBB is None else self.scales_XBB[first:]
        return self.weight_XED[first:], scales


def _expert_weights(moe: Moe) -> tuple[_ExpertWeights, _ExpertWeights, _ExpertWeights]:
    """Gates, ups and downs."""
    gates_XED, ups_XED = moe.gate_up_XED.chunk(2, dim=1)
    if moe.fp8 is None:
        return (
            _ExpertWeights(gates_XED, None),
            _ExpertWeights(ups_XED, None),
            _ExpertWeights(moe.down_XDE, None),
        )
    gate_up, down = moe.fp8
    gate_scales, up_scales = gate_up.scales_XBB.chunk(2, dim=1)
    return (
        _ExpertWeights(gates_XED, gate_scales),
        _ExpertWeights(ups_XED, up_scales),
        _ExpertWeights(moe.down_XDE, down.scales_XBB),
    )
