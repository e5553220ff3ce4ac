"""Writes a seeded random checkpoint in Hugging Face layout, for whoever has none at hand.

Such a model talks nonsense at full speed: it serves to try the server, to measure it, and to test
it. Weights are scaled so that activations stay near 1 and the next-token distribution is neither
flat nor certain.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import INDEX, SINGLE
from .config import ModelConfig, parse_config
from .fp8 import SCALE_SUFFIX, quantise
from .names import mtp_shapes, needed_shapes
from .small_tokenizer import write_tokenizer

# Every mechanism of DeepSeek-V3.2 at a size that two CPU cores serve: 11.6M parameters.
PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "default": {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 768,
            "moe_intermediate_size": 96,
            "num_hidden_layers": 6,
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "index_n_heads": 4,
            "index_head_dim": 64,
            "index_topk": 64,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "attention_bias": False,
            "tie_word_embeddings": False,
            "num_nextn_predict_layers": 0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "torch_dtype": "bfloat16",
        }
    }
)

# Small enough for any file store; a larger checkpoint is sharded.
SHARD_BYTES = 15_000_000

# Weights that published fp8 checkpoints leave alone (DeepSeek-V3.2).
_NEVER_QUANTISED = (
    "embed_tokens.weight",
    "head.weight",
    "gate.weight",
    "weights_proj.weight",
    "eh_proj.weight",
)


def write_random_checkpoint(directory: Path, config: Mapping[str, object], seed: int) -> None:
    """Write config, random weights and a tokenizer; the same arguments give the same bytes."""
    write_checkpoint(directory, config, random_tensors(parse_config(config), seed))


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """fp32 weights under their HF names; MTP layers carry copies of embedding and head."""
    shapes = dict(needed_shapes(config))
    for index in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        shapes |= mtp_shapes(config, index)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    for index in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        tensors[f"model.layers.{index}.embed_tokens.weight"] = embedding.clone()
        tensors[f"model.layers.{index}.shared_head.head.weight"] = head.clone()
    return tensors


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return values * 0.1
    if len(shape) == 1:
        return values * 0.1 + 1.0
    if name.endswith("embed_tokens.weight"):
        return values
    gain = 2.0 if name.endswith("lm_head.weight") else 1.0
    return values * gain * shape[-1] ** -0.5


def write_checkpoint(
    directory: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> None:
    """Write a folder that transformers and this server load; fp8 if the config asks for it."""
    parsed = parse_config(config)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    eos = list(parsed.eos_token_ids)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": parsed.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos},
    )
    _write_weights(directory, _stored(tensors, parsed))
    write_tokenizer(directory, parsed.vocab_size)


def _stored(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors in the dtypes of a published checkpoint."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = dtypes.get(config.dtype or "float32", torch.float32)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if config.quantised and tensor.dim() == 2 and not name.endswith(_NEVER_QUANTISED):
            stored[name], stored[name + SCALE_SUFFIX] = quantise(tensor)
        elif name.endswith("e_score_correction_bias"):
            stored[name] = tensor
        else:
            stored[name] = tensor.to(dtype).contiguous()
    return stored


def _write_weights(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], directory / SINGLE, metadata)
        return
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file, metadata)
    weight_map = {name: f for f, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
