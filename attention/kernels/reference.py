"""Plain torch arithmetic of latent attention and of the lightning indexer.

These are the definitions every kernel is held to, and what serves on a CPU. T queries stand in
rows; each sees `counts_T[t]` keys, which come first. What stands behind them is masked: callers
fill those places with rows of the same request, so that no foreign or unwritten value is touched.
"""

import torch
from torch import Tensor

HIDDEN = float("-inf")


def absorbed_query(nope_THN: Tensor, rope_THR: Tensor, w_uk_HNC: Tensor, scale: float) -> Tensor:
    """scale * (W_UK,h^T q_h, rope_h): queries against latent rows, [T, H, C + R]."""
    latent_HTC = torch.bmm(nope_THN.transpose(0, 1), w_uk_HNC)
    return torch.cat((latent_HTC.transpose(0, 1), rope_THR), dim=-1).mul_(scale)


def unabsorb(latent_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
    """Attended latents moved out to values: W_UV,h latent_h, [T, H, V]."""
    return torch.bmm(latent_THC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)


def latent_attention(
    q_BQX: Tensor, rows_BLX: Tensor, counts_BQ: Tensor | None, latent_width: int
) -> Tensor:
    """softmax(q . row) applied to the latent part of the rows: [B, Q, C].

    q_BQX: absorbed queries with the softmax scale folded in, X = C + R; the Q queries of a batch
    entry share its L rows. counts_BQ: visible rows of each query, at least 1; None: all of them.
    """
    scores_BQL = torch.bmm(q_BQX, rows_BLX.transpose(1, 2))
    if counts_BQ is not None:
        keys_L = torch.arange(rows_BLX.shape[1], device=rows_BLX.device)
        scores_BQL.masked_fill_(keys_L >= counts_BQ.unsqueeze(-1), HIDDEN)
    weights_BQL = torch.softmax(scores_BQL.float(), dim=-1).to(rows_BLX.dtype)
    return torch.bmm(weights_BQL, rows_BLX[..., :latent_width])


def expanded_attention(
    q_HTX: Tensor, k_HLX: Tensor, v_HLV: Tensor, visible_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over expanded keys with its log-sum-exp: ([H, T, V] and fp32 [H, T]).

    q_HTX: queries with the softmax scale folded in, X = N + R. visible_T: how many of the L keys
    each query sees, 0 or less for none; None: all. A query that sees none gets zeros and -inf.
    """
    scores_HTL = torch.bmm(q_HTX, k_HLX.transpose(1, 2)).float()
    if visible_T is not None:
        keys_L = torch.arange(k_HLX.shape[1], device=k_HLX.device)
        scores_HTL.masked_fill_(keys_L >= visible_T.unsqueeze(-1), HIDDEN)
    lse_HT = torch.logsumexp(scores_HTL, dim=-1)
    # -inf - -inf is NaN: a query without keys subtracts 0 instead and weighs every key 0.
    weights_HTL = torch.exp(
        scores_HTL - lse_HT.clamp_min(torch.finfo(torch.float32).min)[..., None]
    )
    return torch.bmm(weights_HTL.to(v_HLV.dtype), v_HLV), lse_HT


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    out: [..., V], lse: [...] natural log. Two empty sides give zeros and -inf, never NaN.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.clamp_min(torch.finfo(lse.dtype).min)
    share_a = torch.exp(lse_a - base).unsqueeze(-1).to(out_a.dtype)
    share_b = torch.exp(lse_b - base).unsqueeze(-1).to(out_b.dtype)
    return out_a * share_a + out_b * share_b, lse


def index_scores(q_BQnD: Tensor, weights_BQn: Tensor, keys_BLD: Tensor) -> Tensor:
    """The indexer's scores, fp32 [B, Q, L]: sum_n w_n * relu(q_n . k).

    The ReLU is per head and comes before the weighted sum; weights may be negative.
    """
    batch, rows, heads, width = q_BQnD.shape
    dots_BLX = torch.bmm(keys_BLD, q_BQnD.reshape(batch, rows * heads, width).transpose(1, 2))
    dots_BLQn = dots_BLX.float().relu_().view(batch, -1, rows, heads)
    return torch.einsum("blqn,bqn->bql", dots_BLQn, weights_BQn.float())
