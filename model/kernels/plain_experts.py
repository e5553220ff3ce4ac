"""A mixture's experts with 16-bit (or fp32) weights: two grouped products and the sum.

    out[t] = sum_k weight[t, k] * down[id[t, k]] (silu(gate x[t]) * up x[t])

The same work as `fp8_experts` without scales: pairs stand in the order of their experts
(`expert_groups.py`), and nothing waits for the host.

- `_products`: rows times the expert's weight. With GATED rows are gathered, and each tile of the
  gate is multiplied beside the tile of up that belongs to it, so that only silu(gate) * up is
  written; else rows go back to the order of the pairs. Few rows take the place of columns: tensor
  cores multiply 64 rows at least, and those are the weight's then.

Sums are fp32; silu(gate) * up is made of gate and up as they are rounded to the rows' dtype. Reads
past the mask: nothing. Called by `layers.moe` on a GPU; the twin is `reference_experts`.

Floor on one H200: the weights of all experts that were chosen at 4.3 TB/s, or 6 * P * D * I
operations for P pairs at 989 TFLOP/s.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...attention.kernels.launch import ceil_div, jit
from .expert_groups import Groups, combine_pairs, group_pairs


@dataclass(frozen=True)
class PlainTiling:
    """Rows, rows of the weight and columns of a tile; warps and stages of loads."""

    rows: int
    weight_rows: int
    columns: int
    num_warps: int
    num_stages: int


@jit
def _products(
    x_ptr,
    w_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    rows,
    columns,
    chosen,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    # rows: of the results, half of the weight's if GATED.
    tiles_e = tl.cdiv(rows, BLOCK_N)
    tile = tl.program_id(0) // tiles_e
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + tile * 3 + 1)
    last = tl.load(tiles_ptr + tile * 3 + 2)
    TURNED: tl.constexpr = BLOCK_M < 64
    place = first + tl.arange(0, BLOCK_M)
    is_pair = place < last
    pair = tl.load(order_ptr + place, mask=is_pair, other=0)
    if GATED:
        source, target = pair // chosen, place
    else:
        source, target = tl.where(is_pair, place, 0), pair
    source, target = source.to(tl.int64), target.to(tl.int64)
    e = tl.program_id(0) % tiles_e * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = e < rows
    weight = expert * rows * (2 if GATED else 1) + tl.minimum(e, rows - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if TURNED else (BLOCK_M, BLOCK_N), tl.float32)
    acc_up = acc
    for begin in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        inside = k < columns
        if TURNED:
            x_place, x_mask = source[None, :] * columns + k[:, None], inside[:, None] & is_pair
            w_place, w_mask = weight[:, None] * columns + k[None, :], is_row[:, None] & inside
        else:
            x_place, x_mask = source[:, None] * columns + k[None, :], is_pair[:, None] & inside
            w_place, w_mask = weight[None, :] * columns + k[:, None], inside[:, None] & is_row
        x = tl.load(x_ptr + x_place, mask=x_mask, other=0.0)
        w = tl.load(w_ptr + w_place, mask=w_mask, other=0.0)
        if TURNED:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            up = tl.load(w_ptr + rows.to(tl.int64) * columns + w_place, mask=w_mask, other=0.0)
            if TURNED:
                acc_up = tl.dot(up, x, acc_up, input_precision="ieee")
            else:
                acc_up = tl.dot(x, up, acc_up, input_precision="ieee")
    out_type = out_ptr.dtype.element_ty
    if GATED:
        gate = acc.to(out_type).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * acc_up.to(out_type).to(tl.float32)
    if TURNED:
        acc = tl.trans(acc)
    mask = is_pair[:, None] & is_row[None, :]
    tl.store(out_ptr + target[:, None] * rows + e[None, :], acc.to(out_type), mask=mask)


def plain_tiling(pairs: int, experts: int) -> PlainTiling:
    """By the rows that an expert gets on average."""
    if pairs <= 20 * experts:
        return PlainTiling(16, 64, 64, 4, 5)
    if pairs <= 128 * experts:
        return PlainTiling(64, 128, 64, 4, 4)
    return PlainTiling(128, 128, 64, 8, 3)


def _grouped(
    x: Tensor, weights_XED: Tensor, groups: Groups, chosen: int, tiling: PlainTiling, out: Tensor
) -> Tensor:
    """chosen: pairs of a row of x, whose products with gate and up are joined; 0 if rows of x are
    in the order of the experts."""
    rows, columns = out.shape[1], x.shape[1]
    _products[(len(groups.tiles_N3) * ceil_div(rows, tiling.weight_rows),)](
        x,
        weights_XED,
        groups.order_P,
        groups.tiles_N3,
        out,
        rows,
        columns,
        chosen,
        chosen > 0,
        groups.tile_rows,
        tiling.weight_rows,
        tiling.columns,
        tiling.num_stages,
        num_warps=tiling.num_warps,
    )
    return out


def plain_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_XED: Tensor,
    down_XDE: Tensor,
    *,
    tiling: PlainTiling | None = None,
) -> Tensor:
    """The weighted sum of the chosen experts' outputs, [T, D] in x's dtype.

    x_TD, ids_TK (integers), weights_TK (fp32) and weights contiguous; the weights have x's dtype,
    gate_up [X, 2 I, D] holds gate rows, then up rows, and down is [X, D, I].
    """
    (tokens, width), chosen = x_TD.shape, ids_TK.shape[1]
    out_TD = torch.empty_like(x_TD)
    if not tokens:
        return out_TD
    num_experts, double, _ = gate_up_XED.shape
    pairs = tokens * chosen
    tiling = tiling or plain_tiling(pairs, num_experts)
    groups = group_pairs(ids_TK, num_experts, tiling.rows)
    middle_PE, pairs_PD = x_TD.new_empty(pairs, double // 2), x_TD.new_empty(pairs, width)
    _grouped(x_TD, gate_up_XED, groups, chosen, tiling, middle_PE)
    _grouped(middle_PE, down_XDE, groups, 0, tiling, pairs_PD)
    return combine_pairs(pairs_PD, weights_TK, out_TD)


def reference_experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_XED: Tensor, down_XDE: Tensor
) -> Tensor:
    """The twin, fp32, rounded to x's dtype where the kernels round."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in ids_TK.unique().tolist():
        t, k = (ids_TK == expert).nonzero(as_tuple=True)
        both = (x_TD[t].float() @ gate_up_XED[expert].float().t()).to(x_TD.dtype)
        gate, up = both.float().chunk(2, dim=1)
        middle = (F.silu(gate) * up).to(x_TD.dtype).float()
        out = (middle @ down_XDE[expert].float().t()).to(x_TD.dtype).float()
        out_TD.index_add_(0, t, out * weights_TK[t, k].unsqueeze(1))
    return out_TD
