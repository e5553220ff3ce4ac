"""Attention by the definition, one query at a time, in fp32: no cache, no batch, no chunks.

Written from the formulas of the papers (DeepSeek-V2 for MLA, DeepSeek-V3.2-Exp for the indexer);
it imports nothing of minidsa.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """One layer: w_uk [H, N, C], w_uv [H, V, C] and the softmax scale."""

    w_uk: Tensor
    w_uv: Tensor
    scale: float


@dataclass(frozen=True)
class Row:
    """One query: nope [H, N], rope [H, R], index heads [n, D] and their weights [n]."""

    nope: Tensor
    rope: Tensor
    index_q: Tensor
    index_w: Tensor


def attend(weights: Weights, row: Row, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Expanded attention over the given keys (latents [m, C], ropes [m, R]).

    Returns [H, V] and the natural log-sum-exp [H].
    """
    outputs, lses = [], []
    for head in range(len(weights.w_uk)):
        keys = latents @ weights.w_uk[head].T
        values = latents @ weights.w_uv[head].T
        logits = weights.scale * (keys @ row.nope[head] + ropes @ row.rope[head])
        lse = torch.logsumexp(logits, 0)
        outputs.append((logits - lse).exp() @ values)
        lses.append(lse)
    return torch.stack(outputs), torch.stack(lses)


def scores(row: Row, index_keys: Tensor) -> list[float]:
    """I_t = sum_j w_j * ReLU(q_j . k_t), the constant scales folded into w."""
    total = torch.zeros(len(index_keys))
    for q, w in zip(row.index_q, row.index_w, strict=True):
        total = total + w * torch.clamp(index_keys @ q, min=0)
    return total.tolist()


def best(values: list[float], k: int) -> list[int]:
    """Positions of the k best, ascending: higher score, then lower position; NaN after all."""

    def order(position: int) -> tuple[bool, float, int]:
        value = values[position]
        missing = math.isnan(value)
        return missing, 0.0 if missing else -value, position

    return sorted(sorted(range(len(values)), key=order)[:k])


def sparse_positions(row: Row, index_keys: Tensor, k: int) -> list[int]:
    """What a query that sees these keys selects."""
    if len(index_keys) <= k:
        return list(range(len(index_keys)))
    return best(scores(row, index_keys), k)
