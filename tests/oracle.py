"""The oracle: one sequence, recomputed in full in fp32 from the published formulas.

No cache, no chunks, no fused weights, no paging; top-k by sorting (score, then lower position). It
reads a raw config dictionary and tensors under their Hugging Face names, and nothing of minidsa.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Trace:
    """logits [T, vocab]; selected[layer][row]: positions the indexer chose, best first."""

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    selected: list[list[list[int]]] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


def run(tensors: Mapping[str, Tensor], config: Mapping[str, Any], token_ids: list[int]) -> Trace:
    """All logits of one sequence."""
    trace = Trace()
    x = tensors["model.embed_tokens.weight"].float()[torch.tensor(token_ids)]
    angles = _angles(config, len(token_ids))
    for i in range(config["num_hidden_layers"]):
        layer = _Layer(tensors, f"model.layers.{i}.")
        eps = config["rms_norm_eps"]
        x = x + _attention(layer, config, layer.norm("input_layernorm", x, eps), angles, trace)
        normed = layer.norm("post_attention_layernorm", x, eps)
        dense = i < config["first_k_dense_replace"]
        x = x + (_mlp(layer, "mlp.", normed) if dense else _moe(layer, config, normed))
    x = _Layer(tensors, "model.").norm("norm", x, config["rms_norm_eps"])
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    trace.logits = x @ tensors[f"{head}.weight"].float().T
    return trace


@dataclass
class _Layer:
    tensors: Mapping[str, Tensor]
    prefix: str

    def weight(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].float()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weight(f"{name}.weight").T

    def norm(self, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.weight(f"{name}.weight")


def _angles(config: Mapping[str, Any], length: int) -> Tensor:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta, dim = rope.get("rope_theta") or config["rope_theta"], config["qk_rope_head_dim"]
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rope.get("rope_type", rope.get("type", "default")) == "yarn":
        context = rope["original_max_position_embeddings"]
        low, high = (
            dim * math.log(context / (rope[beta] * 2 * math.pi)) / (2 * math.log(theta))
            for beta in ("beta_fast", "beta_slow")
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        width = max(high - low, 0.001)
        for i, f in enumerate(frequencies):
            ramp = min(max((i - low) / width, 0.0), 1.0)
            frequencies[i] = f / rope["factor"] * ramp + f * (1 - ramp)
    return torch.arange(length).unsqueeze(1) * torch.tensor(frequencies, dtype=torch.float64)


def _rotate(x: Tensor, angles: Tensor, half_split: bool) -> Tensor:
    """x [T, heads, R]; pairs (i, i + R/2) or (2i, 2i + 1). The output is always half-split."""
    first, second = x.chunk(2, -1) if half_split else (x[..., 0::2], x[..., 1::2])
    cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _softmax_scale(config: Mapping[str, Any]) -> float:
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    return scale * _mscale(config, "mscale_all_dim") ** 2


def _mscale(config: Mapping[str, Any], key: str) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return 0.1 * rope.get(key, 0) * math.log(rope.get("factor", 1)) + 1


def _attention(
    layer: _Layer, config: Mapping[str, Any], x: Tensor, angles: Tensor, trace: Trace
) -> Tensor:
    length, heads = len(x), config["num_attention_heads"]
    nope, rope, v_dim = (config[f"{k}_head_dim"] for k in ("qk_nope", "qk_rope", "v"))
    half_split = not config.get("rope_interleave", True)
    latent_q = x
    if config["q_lora_rank"] is None:
        q = layer.linear("self_attn.q_proj", x)
    else:
        latent_q = layer.norm("self_attn.q_a_layernorm", layer.linear("self_attn.q_a_proj", x))
        q = layer.linear("self_attn.q_b_proj", latent_q)
    q = q.view(length, heads, nope + rope)
    kv, k_rope = layer.linear("self_attn.kv_a_proj_with_mqa", x).split(
        [config["kv_lora_rank"], rope], -1
    )
    kv = layer.linear("self_attn.kv_b_proj", layer.norm("self_attn.kv_a_layernorm", kv))
    k_nope, v = kv.view(length, heads, nope + v_dim).split([nope, v_dim], -1)
    stretch = _mscale(config, "mscale") / _mscale(config, "mscale_all_dim")
    q_rope = _rotate(q[..., nope:], angles, half_split) * stretch
    k_rope = _rotate(k_rope.unsqueeze(1), angles, half_split) * stretch
    logits = torch.einsum("qhd,khd->hqk", q[..., :nope], k_nope)
    logits = (logits + torch.einsum("qhd,kd->hqk", q_rope, k_rope[:, 0])) * _softmax_scale(config)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    if config["model_type"] == "deepseek_v32":
        allowed = _select(layer, config, x, latent_q, angles, trace)
    probabilities = logits.masked_fill(~allowed, -math.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)
    return layer.linear("self_attn.o_proj", out)


def _select(
    layer: _Layer,
    config: Mapping[str, Any],
    x: Tensor,
    latent_q: Tensor,
    angles: Tensor,
    trace: Trace,
) -> Tensor:
    """Rows x keys: True at the chosen keys."""
    length, rope = len(x), config["qk_rope_head_dim"]
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    half_split = not config.get("indexer_rope_interleave", False)
    q = layer.linear("self_attn.indexer.wq_b", latent_q).view(length, heads, dim)
    k = layer.linear("self_attn.indexer.wk", x)
    weight, bias = (layer.weight(f"self_attn.indexer.k_norm.{n}") for n in ("weight", "bias"))
    k = F.layer_norm(k, (dim,), weight, bias, 1e-6).unsqueeze(1)
    stretch = _mscale(config, "mscale") / _mscale(config, "mscale_all_dim")
    q_rope = _rotate(q[..., :rope], angles, half_split) * stretch
    k_rope = _rotate(k[..., :rope], angles, half_split) * stretch
    q, k = torch.cat((q_rope, q[..., rope:]), -1), torch.cat((k_rope, k[..., rope:]), -1)
    dots = torch.einsum("qnd,kd->qnk", q, k[:, 0]).relu()
    weights = layer.linear("self_attn.indexer.weights_proj", x) * (heads * dim) ** -0.5
    scores = torch.einsum("qn,qnk->qk", weights, dots)
    chosen = [
        sorted(range(row + 1), key=lambda t: (-values[t], t))[: config["index_topk"]]
        for row, values in enumerate(scores.tolist())
    ]
    trace.selected.append(chosen)
    trace.scores.append(scores)
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for row, positions in enumerate(chosen):
        allowed[row, positions] = True
    return allowed


def feed_forward(
    tensors: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any], x: Tensor
) -> Tensor:
    """The expert layer whose tensors begin with `prefix`."""
    return _moe(_Layer(tensors, prefix), config, x)


def _moe(layer: _Layer, config: Mapping[str, Any], x: Tensor) -> Tensor:
    return torch.stack([_experts(layer, config, row) for row in x])


def _mlp(layer: _Layer, name: str, x: Tensor) -> Tensor:
    gate, up = layer.linear(f"{name}gate_proj", x), layer.linear(f"{name}up_proj", x)
    return layer.linear(f"{name}down_proj", F.silu(gate) * up)


def _experts(layer: _Layer, config: Mapping[str, Any], x: Tensor) -> Tensor:
    """One token, one expert after the other."""
    scores = layer.linear("mlp.gate", x).sigmoid()
    ranking = (scores + layer.weight("mlp.gate.e_score_correction_bias")).tolist()
    size = config["n_routed_experts"] // config["n_group"]
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config["n_group"])]
    groups.sort(key=lambda group: -sum(sorted(ranking[e] for e in group)[-2:]))
    eligible = sorted(e for group in groups[: config["topk_group"]] for e in group)
    chosen = sorted(eligible, key=lambda e: -ranking[e])[: config["num_experts_per_tok"]]
    weights = scores[chosen]
    if config["norm_topk_prob"]:
        weights = weights / (weights.sum() + 1e-20)
    out = torch.zeros_like(x)
    if config["n_shared_experts"]:
        out = _mlp(layer, "mlp.shared_experts.", x)
    for weight, expert in zip(weights * config["routed_scaling_factor"], chosen, strict=True):
        out = out + weight * _mlp(layer, f"mlp.experts.{expert}.", x)
    return out
