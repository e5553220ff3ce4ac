"""A mixture's experts with block-scaled fp8 weights: grouping, two grouped products, the sum.

    out[t] = sum_k weight[t, k] * down[id[t, k]] (silu(gate x[t]) * up x[t])

Token-expert pairs are put in the order of their experts; a tile is some pairs of one expert times
some rows of its weight. Nothing waits for the host: the grid is as large as it could need to be,
and programs without a tile leave. For a pair the sums have one fixed order whatever stands beside
it, and the pairs of a token are added in the order of its choice.

- `group_pairs` (`expert_groups.py`): where each pair stands when pairs are sorted by expert, and
  the tiles of each.
- `_products`: rows (gathered for the first product) times the expert's weight, blocks as in
  `fp8_linear`; many rows on Hopper are a matter of `fp8_hopper.py`.
- `combine_pairs`: the weighted sum over a token's experts.

Reads past the mask: nothing. The twin is `reference_experts`.

Floor on one H200: the weights of all experts that were chosen at 4.3 TB/s, or 6 * P * D * I
operations for P pairs at 1979 TFLOP/s.
"""

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...attention.kernels.fp8_rows import quantise
from ...attention.kernels.launch import ceil_div, jit
from ..fp8 import Fp8Weights, dequantise
from . import fp8_hopper
from .expert_groups import Groups, combine_pairs, group_pairs
from .fp8_linear import ProductTiling, add_blocks
from .fp8_rows import GROUP, Fp8Rows, quantise_rows

# From so many rows for each expert on the products by hand are faster.
HOPPER_ROWS = 48


@jit
def _products(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    x_rows,
    rows,
    columns,
    chosen,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The tiles of weights that a tile of pairs is multiplied with are neighbours.
    tiles_e = tl.cdiv(rows, BLOCK_N)
    tile = tl.program_id(0) // tiles_e
    tile_e = tl.program_id(0) % tiles_e
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + tile * 3 + 1)
    last = tl.load(tiles_ptr + tile * 3 + 2)
    place = first + tl.arange(0, BLOCK_M)
    is_pair = place < last
    pair = tl.load(order_ptr + place, mask=is_pair, other=0)
    # The first product reads a token's row for each of its pairs and leaves rows in the order of
    # the experts; the second reads those and puts them back.
    if GATHER:
        source, target = pair // chosen, place
    else:
        source, target = tl.where(is_pair, place, 0), pair
    source, target = source.to(tl.int64), target.to(tl.int64)
    e = tile_e * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    blocks = columns // 128
    e_read = tl.minimum(e, rows - 1).to(tl.int64)
    acc = add_blocks(
        x_ptr + source[:, None] * columns + k[None, :],
        is_pair[:, None],
        x_scale_ptr + source,
        w_ptr + (expert * rows + e_read)[None, :] * columns + k[:, None],
        (e < rows)[None, :],
        w_scale_ptr + (expert * tl.cdiv(rows, 128) + tile_e * BLOCK_N // 128) * blocks,
        0,
        blocks,
        x_rows,
        BLOCK_M,
        BLOCK_N,
        STAGES,
    )
    mask = is_pair[:, None] & (e < rows)[None, :]
    tl.store(
        out_ptr + target[:, None] * rows + e[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=mask,
    )


def experts_tiling(tokens: int, chosen: int, num_experts: int) -> ProductTiling:
    """By the rows that an expert gets on average."""
    if tokens * chosen <= 16:
        # All tiles of so few experts run at once if a multiprocessor has room for four.
        return ProductTiling(16, 128, 4, 3, 1)
    if tokens * chosen <= 12 * num_experts:
        return ProductTiling(16, 128, 4, 5, 1)
    # Larger tiles are slower: two programs a multiprocessor hide each other's scaling.
    return ProductTiling(64, 128, 4, 4, 2)


def grouped_product(
    x: Fp8Rows, weights: Fp8Weights, groups: Groups, chosen: int, tiling: ProductTiling, out: Tensor
) -> Tensor:
    """Every pair's row times its expert's weight, into out [P, E].

    x: T rows, one a token, when P = T * chosen of them are wanted in the order of the experts; or P
    rows in that order, and out is in the order of the pairs (chosen 0).
    """
    rows, columns = weights.values_XED.shape[1:]
    _products[(len(groups.tiles_N3) * ceil_div(rows, tiling.weight_rows),)](
        x.values_TD,
        x.scales_GT,
        weights.values_XED,
        weights.scales_XBB,
        groups.order_P,
        groups.tiles_N3,
        out,
        len(x.values_TD),
        rows,
        columns,
        chosen,
        chosen > 0,
        groups.tile_rows,
        tiling.weight_rows,
        tiling.num_stages,
        num_warps=tiling.num_warps,
    )
    return out


def fp8_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Fp8Weights,
    down: Fp8Weights,
    *,
    rows: Fp8Rows | None = None,
    tiling: ProductTiling | None = None,
) -> Tensor:
    """The weighted sum of the chosen experts' outputs, [T, D] in x's dtype.

    x_TD: bf16 or fp16. ids_TK: integers, contiguous; weights_TK: fp32, contiguous. gate_up: gate
    rows, then up rows, [X, 2 I, D]; down: [X, D, I]; D and I multiples of 128. rows: x_TD
    in fp8, if that was made already.
    """
    (tokens, width), chosen = x_TD.shape, ids_TK.shape[1]
    out_TD = torch.empty_like(x_TD)
    if not tokens:
        return out_TD
    num_experts, double, _ = gate_up.values_XED.shape
    pairs = tokens * chosen
    x, pairs_PD = rows or quantise_rows(x_TD), x_TD.new_empty(pairs, width)
    if tiling is None and pairs >= HOPPER_ROWS * num_experts and fp8_hopper.suits(x, width):
        groups = group_pairs(ids_TK, num_experts, fp8_hopper.ROWS)
        middle = Fp8Rows.empty(pairs, double // 2, x_TD.device)
        fp8_hopper.hopper_experts(x, gate_up, groups, chosen, middle)
        fp8_hopper.hopper_experts(middle, down, groups, 0, pairs_PD)
    else:
        tiling = tiling or experts_tiling(tokens, chosen, num_experts)
        groups = group_pairs(ids_TK, num_experts, tiling.rows)
        middle_PE = x_TD.new_empty(pairs, double)
        grouped_product(x, gate_up, groups, chosen, tiling, middle_PE)
        middle = quantise_rows(middle_PE, swiglu=True)
        grouped_product(middle, down, groups, 0, tiling, pairs_PD)
    return combine_pairs(pairs_PD, weights_TK, out_TD)


def reference_experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Fp8Weights, down: Fp8Weights
) -> Tensor:
    """The twin: dequantised weights, rows rounded to fp8 where the kernels round them; fp32."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    rows_TD = quantised(x_TD)
    for expert in ids_TK.unique().tolist():
        t, k = (ids_TK == expert).nonzero(as_tuple=True)
        first_ED = dequantise(gate_up.values_XED[expert], gate_up.scales_XBB[expert])
        gate, up = (rows_TD[t] @ first_ED.t()).to(x_TD.dtype).float().chunk(2, dim=1)
        second_DE = dequantise(down.values_XED[expert], down.scales_XBB[expert])
        out = (quantised(F.silu(gate) * up) @ second_DE.t()).to(x_TD.dtype).float()
        out_TD.index_add_(0, t, out * weights_TK[t, k].unsqueeze(1))
    return out_TD


def quantised(x_TD: Tensor) -> Tensor:
    """Rows rounded to fp8 by groups of 128 columns and back, fp32."""
    values, scales = quantise(x_TD.unflatten(1, (-1, GROUP)))
    return (values.float() * scales.unsqueeze(-1)).flatten(1)
