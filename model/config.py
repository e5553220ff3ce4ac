"""What a checkpoint's config.json says, as frozen values: the only reader of Hugging Face keys.

The raw file is parsed, not transformers' configuration classes: those rename, alias and drop keys.
Absent keys take the documented defaults written out in `config_defaults.py`; a key without one is
an error. What would change the mathematics and is not implemented
is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..kv_cache.layout import RowLayout
from .config_defaults import DEFAULTS
from .keys import ConfigError, Keys
from .rope_config import RopeConfig, read_rope


@dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer of DeepSeek Sparse Attention."""

    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool


@dataclass(frozen=True)
class MoeConfig:
    """Routed and shared experts with the sigmoid, group-limited gate."""

    num_experts: int
    num_shared: int
    num_chosen: int
    intermediate_size: int
    num_groups: int
    num_chosen_groups: int
    scale: float
    normalise: bool


@dataclass(frozen=True)
class ModelConfig:
    """One model. `dense_layers[i]` tells whether layer i has a plain MLP instead of experts.

    `dtype` is the one the checkpoint declares, or None. `quantised`: linear weights may be stored
    as e4m3 in blocks of 128 x 128 with a scale each.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: RopeConfig
    dense_layers: tuple[bool, ...]
    moe: MoeConfig | None
    indexer: IndexerConfig | None
    num_mtp_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    quantised: bool

    @property
    def num_layers(self) -> int:
        return len(self.dense_layers)

    @property
    def softmax_scale(self) -> float:
        """Scale of q.k: the width of the expanded form, whichever form computes it."""
        scale = (self.nope_dim + self.rope_dim) ** -0.5
        return scale * self.rope.yarn.softmax_scale if self.rope.yarn else scale

    def cache_layout(self, *, with_mtp: bool = False, is_fp8: bool = False) -> RowLayout:
        """Widths of the rows a token leaves in the cache; the MTP layer's come last.

        Raises ValueError where rows of these widths cannot be kept in fp8.
        """
        return RowLayout(
            latent_width=self.kv_lora_rank + self.rope_dim,
            index_width=self.indexer.head_dim if self.indexer else 0,
            index_layers=(self.indexer is not None,) * (self.num_layers + with_mtp),
            rope_width=self.rope_dim,
            is_fp8=is_fp8,
        )


def parse_config(
    raw: Mapping[str, object], generation: Mapping[str, object] | None = None
) -> ModelConfig:
    """Parse a config.json; `generation` is generation_config.json, whose EOS ids come first.

    Raises ConfigError with one line that names the key.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        nested = " (nested text_config)" if "text_config" in raw else ""
        raise ConfigError(
            f"model_type = {kind!r}{nested} is not supported; supported: {', '.join(DEFAULTS)}"
        )
    keys = Keys(raw, DEFAULTS[kind])
    _refuse_unsupported(keys)
    heads = keys.integer("num_attention_heads", 1, 4096)
    if "num_key_value_heads" in keys and keys.integer("num_key_value_heads", 1, 4096) != heads:
        value = keys.value("num_key_value_heads")
        raise keys.fail("num_key_value_heads", value, f"MLA needs num_attention_heads = {heads}")
    vocab_size = keys.integer("vocab_size", 1, 1 << 22)
    max_position = keys.integer("max_position_embeddings", 1, 1 << 24)
    dense_layers = _dense_layers(keys)
    return ModelConfig(
        model_type=kind,
        vocab_size=vocab_size,
        hidden_size=keys.integer("hidden_size", 1, 1 << 17),
        intermediate_size=keys.integer("intermediate_size", 1, 1 << 20),
        max_position_embeddings=max_position,
        rms_norm_eps=keys.number("rms_norm_eps", 0.0, 1.0),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        num_heads=heads,
        q_lora_rank=None if keys.value("q_lora_rank") is None else _even(keys, "q_lora_rank"),
        kv_lora_rank=_even(keys, "kv_lora_rank"),
        nope_dim=_even(keys, "qk_nope_head_dim"),
        rope_dim=_even(keys, "qk_rope_head_dim"),
        v_dim=keys.integer("v_head_dim", 1, 1 << 14),
        rope=read_rope(keys, max_position),
        dense_layers=dense_layers,
        moe=None if all(dense_layers) else _read_moe(keys),
        indexer=_read_indexer(keys, max_position) if kind == "deepseek_v32" else None,
        num_mtp_layers=_num_mtp_layers(keys),
        bos_token_id=keys.optional_integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=_eos(keys, generation, vocab_size),
        dtype=_read_dtype(keys),
        quantised=_read_quantisation(keys),
    )


def _refuse_unsupported(keys: Keys) -> None:
    keys.choice("attention_bias", (False,))
    keys.choice("mlp_bias", (False,))
    keys.choice("hidden_act", ("silu",))
    keys.choice("moe_layer_freq", (1,))
    keys.choice("scoring_func", ("sigmoid",))
    keys.choice("topk_method", ("noaux_tc",))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in keys and keys.value(key):
            raise keys.fail(key, keys.value(key), "capped logits are not supported")
    for key in ("indexer_types", "index_topk_pattern", "index_topk_freq"):
        if key in keys and not _selects_everywhere(keys, key):
            raise keys.fail(key, keys.value(key), "layers that share a selection are not supported")


def _selects_everywhere(keys: Keys, key: str) -> bool:
    """Whether every layer is said to have an indexer of its own, in any of the three spellings."""
    kinds = keys.value(key)
    if isinstance(kinds, str | list):
        layers = keys.integer("num_hidden_layers", 1, 1024)
        return len(kinds) >= layers and all(kind in ("full", "F") for kind in kinds)
    return kinds == 1 and not isinstance(kinds, bool)


def _even(keys: Keys, key: str) -> int:
    """Rotated pairs are read as one complex number, which needs even offsets and strides."""
    width = keys.integer(key, 2, 1 << 16)
    if width % 2:
        raise keys.fail(key, width, "an even number is expected")
    return width


def _dense_layers(keys: Keys) -> tuple[bool, ...]:
    layers = keys.integer("num_hidden_layers", 1, 1024)
    kinds = keys.value("mlp_layer_types")
    if kinds is None:
        first = keys.integer("first_k_dense_replace", 0, 1 << 20)
        return tuple(i < first for i in range(layers))
    if not isinstance(kinds, list) or not {"dense", "sparse"}.issuperset(kinds):
        raise keys.fail("mlp_layer_types", kinds, "a list of 'dense' and 'sparse' is expected")
    if len(kinds) != layers:
        raise keys.fail("mlp_layer_types", kinds, f"{layers} entries are expected")
    return tuple(kind == "dense" for kind in kinds)


def _read_moe(keys: Keys) -> MoeConfig:
    spelled = [k for k in ("n_routed_experts", "num_local_experts", "num_experts") if k in keys]
    counts = {keys.integer(k, 1, 1 << 14) for k in spelled or ["n_routed_experts"]}
    if len(counts) > 1:
        raise keys.fail(spelled[0], sorted(counts), f"{' and '.join(spelled)} disagree")
    experts = counts.pop()
    groups = keys.integer("n_group", 1, experts)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise keys.fail(
            "n_group", groups, f"does not split n_routed_experts = {experts} in groups of 2 or more"
        )
    chosen_groups = keys.integer("topk_group", 1, groups)
    eligible = experts // groups * chosen_groups
    chosen = keys.integer("num_experts_per_tok", 1, 1 << 14)
    if chosen > eligible:
        raise keys.fail("num_experts_per_tok", chosen, f"only {eligible} experts can be chosen")
    return MoeConfig(
        num_experts=experts,
        num_shared=keys.integer("n_shared_experts", 0, 64),
        num_chosen=chosen,
        intermediate_size=keys.integer("moe_intermediate_size", 1, 1 << 20),
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        scale=keys.number("routed_scaling_factor", 0.0, 1e4),
        normalise=keys.flag("norm_topk_prob"),
    )


def _read_indexer(keys: Keys, max_position: int) -> IndexerConfig:
    if keys.value("q_lora_rank") is None:
        raise keys.fail("q_lora_rank", None, "the indexer needs the query latent")
    head_dim, rope_dim = _even(keys, "index_head_dim"), _even(keys, "qk_rope_head_dim")
    if rope_dim > head_dim:
        raise keys.fail("index_head_dim", head_dim, f"less than qk_rope_head_dim = {rope_dim}")
    topk = keys.integer("index_topk", 1, 1 << 24)
    if topk > max_position:
        raise keys.fail("index_topk", topk, f"above max_position_embeddings = {max_position}")
    return IndexerConfig(
        num_heads=keys.integer("index_n_heads", 1, 4096),
        head_dim=head_dim,
        topk=topk,
        rope_interleaved=keys.flag("indexer_rope_interleave"),
    )


def _num_mtp_layers(keys: Keys) -> int:
    alias = "num_mtp_layers" in keys and "num_nextn_predict_layers" not in keys
    return keys.integer("num_mtp_layers" if alias else "num_nextn_predict_layers", 0, 64)


def _eos(keys: Keys, generation: Mapping[str, object] | None, vocab_size: int) -> tuple[int, ...]:
    chosen = Keys(generation or {}, {"eos_token_id": None}, "generation_config.json: ")
    holder = chosen if "eos_token_id" in chosen else keys
    return holder.integers("eos_token_id", 0, vocab_size - 1)


def _read_dtype(keys: Keys) -> str | None:
    key = next((k for k in ("dtype", "torch_dtype") if k in keys), None)
    return None if key is None else str(keys.choice(key, ("bfloat16", "float16", "float32")))


def _read_quantisation(keys: Keys) -> bool:
    section = keys.section("quantization_config", {"fmt": "e4m3", "activation_scheme": "dynamic"})
    if section is None:
        return False
    section.choice("quant_method", ("fp8",))
    section.choice("fmt", ("e4m3",))
    section.choice("activation_scheme", ("dynamic",))
    section.choice("weight_block_size", ([128, 128],))
    return True
