"""The shape of the model that is trained, spelled with the keys of a DeepSeek-V3.2 config.json.

One frozen dataclass serves the trainer, the exporter and the evaluation, so that the file that
ships cannot differ from the module that was trained.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class YarnConfig:
    """The `rope_scaling` object of config.json."""

    factor: float = 4.0
    original_max_position_embeddings: int = 1024
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Field names are those of config.json; see README.md for why each size was chosen."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    first_k_dense_replace: int = 1
    intermediate_size: int = 768
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 96
    n_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.0
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    rope_scaling: YarnConfig = YarnConfig()

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: the part without position and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Attention scale with YaRN's mscale squared (DeepSeek-V3 modeling, transformers)."""
        yarn = self.rope_scaling
        mscale = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0
        return self.qk_head_dim**-0.5 * mscale * mscale

    def to_json(self) -> dict[str, object]:
        """config.json, complete enough for transformers and for any V3.2 engine."""
        keys = asdict(self)
        yarn = keys.pop("rope_scaling")
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            **keys,
            "rope_scaling": {"type": "yarn", **yarn},
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


# Small enough for a minute on one CPU core, with every mechanism of the shipped shape in it.
SMOKE = ModelConfig(
    vocab_size=1024,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    index_n_heads=2,
    index_head_dim=32,
    index_topk=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    max_position_embeddings=512,
    rope_scaling=YarnConfig(original_max_position_embeddings=128),
)

PRESETS = {"tiny": ModelConfig(), "smoke": SMOKE}


def read_config(folder: Path) -> ModelConfig:
    """The config of an exported checkpoint.

    Raises:
        KeyError: config.json lacks a key; the message names it.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    yarn = YarnConfig(**{f.name: raw["rope_scaling"][f.name] for f in fields(YarnConfig)})
    names = [f.name for f in fields(ModelConfig) if f.name != "rope_scaling"]
    return ModelConfig(**{name: raw[name] for name in names}, rope_scaling=yarn)
