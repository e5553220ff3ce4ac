"""Products of fp8 rows with a block-scaled fp8 weight, for few rows.

    out[t, e] = sum_b x_scale[b, t] * w_scale[e // 128, b] * sum_{d in block b} x[t, d] * w[e, d]

Hopper's tensor cores add up fp8 products in about 14 bits, so each block of 128 columns is a
product of its own, and the sums of blocks are kept in fp32. A step of decoding has few rows: the
time is that of reading the weight. The columns are cut into parts until enough programs read at
once; each part leaves its sums, which are added in a fixed order. Many rows are a matter of cuBLAS
(`layers/fp8.py` chooses).

Reads past the mask: nothing. The twin is `plain` of the rows times the dequantised weight.

Floor on one H200: E * D bytes at 4.3 TB/s, or 2 * T * E * D operations at 1979 TFLOP/s.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ...attention.kernels.launch import ceil_div, jit, multiprocessors
from .fp8_rows import GROUP, Fp8Rows


@dataclass(frozen=True)
class ProductTiling:
    """Rows of x and of the weight in a tile; warps, stages of loads, programs a multiprocessor."""

    rows: int
    weight_rows: int
    num_warps: int
    num_stages: int
    programs: int


@jit
def add_blocks(
    x_pointers,
    x_read,
    x_scale_pointers,
    w_pointers,
    w_read,
    w_scale_pointer,
    first,
    last,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sum over blocks first..last - 1 of 128 columns each: fp32 [BLOCK_M, BLOCK_N].

    The instructions for whole warp groups multiply 64 rows at least by 8 columns at least: where x
    has fewer rows, the weight's rows take their place and the sum is turned at the end.

    x_pointers [BLOCK_M, 128] and w_pointers [128, BLOCK_N] point into block 0; x_scale_pointers
    [BLOCK_M] to the scales of block 0, which are scale_stride apart; w_scale_pointer likewise, 1
    apart: a tile lies within one row of the weight's blocks.
    """
    TURNED: tl.constexpr = BLOCK_M < 64
    if TURNED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        x = tl.load(x_pointers + block * 128, mask=x_read, other=0.0)
        w = tl.load(w_pointers + block * 128, mask=w_read, other=0.0)
        x_scale = tl.load(x_scale_pointers + block * scale_stride)
        w_scale = tl.load(w_scale_pointer + block)
        if TURNED:
            acc += tl.dot(tl.trans(w), tl.trans(x)) * (x_scale * w_scale)[None, :]
        else:
            acc += tl.dot(x, w) * (x_scale * w_scale)[:, None]
    if TURNED:
        acc = tl.trans(acc)
    return acc


@jit
def _linear(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    tokens,
    rows,
    columns,
    scale_stride,
    blocks_per_part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Tiles of tokens are neighbours: they share a tile of the weight.
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    blocks = columns // 128
    k = tl.arange(0, 128)
    # Tokens behind the last read the last one again and are not stored.
    t_read = tl.minimum(t, tokens - 1).to(tl.int64)
    e_read = tl.minimum(e, rows - 1).to(tl.int64)
    acc = add_blocks(
        x_ptr + t_read[:, None] * columns + k[None, :],
        (t < tokens)[:, None],
        x_scale_ptr + t_read,
        w_ptr + e_read[None, :] * columns + k[:, None],
        (e < rows)[None, :],
        w_scale_ptr + (tl.program_id(1) * BLOCK_N // 128).to(tl.int64) * scale_stride,
        part * blocks_per_part,
        tl.minimum((part + 1) * blocks_per_part, blocks),
        tokens,
        BLOCK_M,
        BLOCK_N,
        STAGES,
    )
    place = (part.to(tl.int64) * tokens + t[:, None]) * rows + e[None, :]
    mask = (t < tokens)[:, None] & (e < rows)[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _add_parts(parts_ptr, out_ptr, count, parts, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        acc += tl.load(parts_ptr + part * count + place, mask=place < count, other=0.0)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=place < count)


def product_tiling(tokens: int) -> ProductTiling:
    """For so many rows of x: the best of those that `benchmarks/product_cases.py` tries."""
    if tokens <= 16:
        return ProductTiling(16, 64, 4, 6, 2)
    return ProductTiling(32 if tokens <= 32 else 64, 64, 4, 6, 2)


def fp8_linear(
    x: Fp8Rows,
    weight_ED: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    *,
    tiling: ProductTiling | None = None,
) -> Tensor:
    """x times the transpose of the weight, [T, E] in `dtype`.

    weight_ED: e4m3, contiguous, D a multiple of 128, any E. scales: fp32
    [ceil(E / 128), D / 128], with dense rows. Raises ValueError for other shapes.
    """
    (tokens, columns), rows = x.values_TD.shape, len(weight_ED)
    expected = (ceil_div(rows, GROUP), columns // GROUP)
    if weight_ED.shape[1] != columns or scales.shape != expected:
        raise ValueError(
            f"rows of {columns} columns need a weight as wide and scales {expected}, got "
            f"{tuple(weight_ED.shape)} and {tuple(scales.shape)}"
        )
    out_TE = torch.empty(tokens, rows, dtype=dtype, device=weight_ED.device)
    if not tokens:
        return out_TE
    tiling = tiling or product_tiling(tokens)
    blocks = columns // GROUP
    grid = (ceil_div(tokens, tiling.rows), ceil_div(rows, tiling.weight_rows))
    wanted = multiprocessors(weight_ED.device) * tiling.programs // (grid[0] * grid[1])
    per_part = ceil_div(blocks, max(1, min(wanted, blocks // 4)))
    parts = ceil_div(blocks, per_part)
    sums = out_TE
    if parts > 1:
        sums = torch.empty(parts, tokens, rows, dtype=torch.float32, device=weight_ED.device)
    _linear[(*grid, parts)](
        x.values_TD,
        x.scales_GT,
        weight_ED,
        scales,
        sums,
        tokens,
        rows,
        columns,
        scales.stride(0),
        per_part,
        tiling.rows,
        tiling.weight_rows,
        tiling.num_stages,
        num_warps=tiling.num_warps,
    )
    if parts > 1:
        count = out_TE.numel()
        _add_parts[(ceil_div(count, 1024),)](sums, out_TE, count, parts, 1024)
    return out_TE
