"""What an absent key of config.json means, for each supported model type.

The values are those of transformers 5.17's configuration classes, so a file that leaves a key out
means the same here as there.
"""

from collections.abc import Mapping

# Keys that transformers' classes do not declare but whose absence has one meaning.
_COMMON = {
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "mlp_layer_types": None,
    "moe_layer_freq": 1,
    "num_key_value_heads": None,
    "num_nextn_predict_layers": 0,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
# DeepseekV3Config. rope_theta is left out on purpose: a guess is worse than an error.
_DEEPSEEK_V3 = _COMMON | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "deepseek_v32": _DEEPSEEK_V3
    | {
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": False,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    # No class of transformers knows kimi_k2, so there is nothing to fall back on.
    "kimi_k2": _COMMON,
}
