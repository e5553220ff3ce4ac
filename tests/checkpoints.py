"""The small checkpoints that tests share, each built once in a session.

T_CPU has every mechanism of DeepSeek-V3.2 at a size that takes milliseconds. What is served step by
step has two of its layers, a dense one and one of experts, and changes one thing or none. Its four
index heads and random weights make exact ties of index scores common (a key that every head rejects
scores 0), which is what a total order of the selection is for.
"""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minidsa.model.config import parse_config
from minidsa.model.make_checkpoint import random_tensors, write_checkpoint

T_CPU: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
)

T_SERVED: Mapping[str, Any] = MappingProxyType(dict(T_CPU) | {"num_hidden_layers": 2})

FP8: Mapping[str, Any] = MappingProxyType(
    {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
)

T_WIDE: Mapping[str, Any] = MappingProxyType(
    dict(T_CPU)
    | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "torch_dtype": "bfloat16",
        "quantization_config": dict(FP8),
    }
)

# The widths of DeepSeek-V3.2's attention and indexer, fewer and narrower layers, fp8 weights.
T_V32: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "quantization_config": dict(FP8),
    }
)

NAN_TOKEN = 77
"""The token id of `t_nan` whose hidden states turn to NaN."""

EOS_IDS = tuple(range(1, 512, 16))
"""End-of-sequence ids of `t_eos`: about one token in sixteen ends a request."""


def new_folder() -> Path:
    """An empty folder that is removed when the interpreter ends."""
    folder = Path(tempfile.mkdtemp(prefix="minidsa-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tensors_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random fp32 weights under their Hugging Face names."""
    return random_tensors(parse_config(config), seed)


def _written(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder = new_folder()
    write_checkpoint(folder, dict(config), tensors)
    return folder


@functools.cache
def t_four_layers() -> Path:
    """T_CPU as it is."""
    return _written(T_CPU, tensors_of(T_CPU))


@functools.cache
def t_cpu() -> Path:
    """The ordinary bed."""
    return _written(T_SERVED, tensors_of(T_SERVED))


@functools.cache
def t_tied() -> Path:
    """Rows 2i and 2i + 1 of the head are one ulp apart: the last bits decide who wins."""
    return _written(T_SERVED, _tied(tensors_of(T_SERVED)))


@functools.cache
def t_tied_dense() -> Path:
    """`t_tied` without an indexer, so that every length is attended to whole."""
    config = {name: value for name, value in T_SERVED.items() if not name.startswith("index_")}
    config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return _written(config, _tied(tensors_of(config)))


def _tied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    head = tensors["lm_head.weight"]
    head[1::2] = torch.nextafter(head[0::2], torch.tensor(torch.inf))
    return tensors


@functools.cache
def t_many_index_heads() -> Path:
    """The index queries are by far the widest of what a layer computes element by element."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "index_n_heads": 64}
    widths = {"index_head_dim": 64, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 0}
    config = dict(T_SERVED) | heads | widths
    return _written(config, tensors_of(config))


@functools.cache
def t_nan() -> Path:
    """NAN_TOKEN yields NaN from layer 0 on, every other token is as good as ever.

    All weights are finite. One hidden channel belongs to that token alone: nobody else's embedding
    and no layer writes to it, and the first MLP multiplies it past the largest float.
    """
    channel = 0
    tensors = tensors_of(T_SERVED)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[channel] = 0
    tensors["model.embed_tokens.weight"][:, channel] = 0
    tensors["model.embed_tokens.weight"][NAN_TOKEN, channel] = 8
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"][:, channel] = 3e38
    return _written(T_SERVED, tensors)


@functools.cache
def t_eos() -> Path:
    """Requests end early and at different lengths; four layers say more before they do."""
    return _written(dict(T_CPU) | {"eos_token_id": list(EOS_IDS)}, tensors_of(T_CPU))


@functools.cache
def t_markov() -> Path:
    """What follows a token depends on that token alone, and its MTP layer knows it exactly.

    No layer adds anything to the embeddings; the MTP layer passes that of the next token on.
    """
    tensors = tensors_of(T_SERVED)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    hidden = T_SERVED["hidden_size"]
    prefix = f"model.layers.{T_SERVED['num_hidden_layers']}."
    tensors[f"{prefix}eh_proj.weight"] = torch.cat(
        [torch.eye(hidden), torch.zeros(hidden, hidden)], 1
    )
    for name in ("enorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
    tensors["model.norm.weight"] = torch.ones(hidden)
    return _written(T_SERVED, tensors)


@functools.cache
def t_wide() -> Path:
    """Linear weights in fp8, blocks of 128 x 128, with edges that are no multiple of 128."""
    return _written(T_WIDE, tensors_of(T_WIDE))


@functools.cache
def t_v32() -> Path:
    """A checkpoint of seconds, for a GPU: its kernels meet the shapes they were made for."""
    return _written(T_V32, tensors_of(T_V32))
