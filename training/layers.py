"""The building blocks of the trained model: norms, rotary positions, experts, the indexer.

Module and parameter names are the checkpoint's names (Hugging Face, DeepSeek-V3.2), so export is a
cast and one split of the stacked experts. Dense shapes only: at this size a wide product over all
experts is faster than any dispatch, and it is exact.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, statistics in fp32."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [R/2] with YaRN's ramp between kept and interpolated ones."""
    dim, yarn = config.qk_rope_head_dim, config.rope_scaling
    base = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def correction(rotations: float) -> float:
        span = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(config.rope_theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return base / yarn.factor * (1 - keep) + base * keep


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """MLA's rotation of (2i, 2i+1). x [B, T, *, R]; cos, sin [T, 1, R/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The indexer's rotation of (i, i + R/2), as V3.2's corrected inference code has it."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores, group-limited choice with a balancing bias that never weighs (noaux_tc)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        experts = config.n_routed_experts
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(experts))
        # Tokens each expert got since the bias was last moved; not part of the checkpoint.
        self.load = nn.Buffer(torch.zeros(experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate of every expert, 0 where not chosen. x [N, D] -> [N, E], fp32."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        grouped = choice.view(-1, c.n_group, c.n_routed_experts // c.n_group)
        best_groups = grouped.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0]).scatter(1, best_groups, 1.0)
        choice = grouped.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(1)
        chosen = choice.topk(c.num_experts_per_tok, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        if self.training:
            self.load += mask.sum(0)
        gates = scores * mask
        return gates / (gates.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the bias toward equal loads (auxiliary-loss-free balancing of DeepSeek-V3)."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Experts(nn.Module):
    """All routed experts stacked: gate and up [E, I, D], down [E, D, I]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        shape = (config.n_routed_experts, config.moe_intermediate_size, config.hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(shape))
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Sum over experts of gate * expert(x). x [N, D], gates [N, E] -> [N, D]."""
        experts, inner, _ = self.gate_proj.shape
        act = F.silu(F.linear(x, self.gate_proj.flatten(0, 1)))
        act = act * F.linear(x, self.up_proj.flatten(0, 1))
        act = act.view(-1, experts, inner) * gates.to(act.dtype).unsqueeze(-1)
        return F.linear(act.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config.hidden_size, shared)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        routed = self.experts(flat, self.gate(flat)).view_as(x)
        return routed + self.shared_experts(x)


class Indexer(nn.Module):
    """Lightning indexer: I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s] * d^-0.5)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.rope = config.qk_rope_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def project(self, x: Tensor, q_latent: Tensor, rope: tuple[Tensor, Tensor]):
        """Queries [B, T, h, d], keys [B, T, d] and head weights [B, T, h] with all scales in."""
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        k = self.k_norm(self.wk(x).float()).to(q.dtype).unsqueeze(2)
        q, k = (
            torch.cat([rotate_halves(t[..., : self.rope], *rope), t[..., self.rope :]], dim=-1)
            for t in (q, k)
        )
        weights = self.weights_proj(x).float() * (self.heads * self.dim) ** -0.5
        return q, k.squeeze(2), weights

    @staticmethod
    def scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """q [B, Q, h, d], k [B, T, d], weights [B, Q, h] -> [B, Q, T] in fp32, causal not applied.

        One head at a time: the [B, h, Q, T] tensor would be the largest of the whole step.
        """
        total = None
        for head in range(q.shape[2]):
            part = F.relu(q[:, :, head] @ k.transpose(1, 2)).float() * weights[:, :, head, None]
            total = part if total is None else total + part
        assert total is not None
        return total
