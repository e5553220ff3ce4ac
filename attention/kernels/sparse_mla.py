"""Sparse latent attention: each query attends to its own list of cache slots, in place.

    out[t, h] = sum_k softmax_k(q[t, h] . row[slots[t, k]]) * latent(row[slots[t, k]])

For decode, verify and prefill alike, over rows of the model's format or over fp8 rows (see
`latent_rows.py`). A program takes a block of the heads of one query, so that a row read once serves
up to 64 heads, and a part of its slots; tensor cores do both products, the softmax goes along
(`online_softmax.py`).

Read past the mask: nothing. A slot behind the count or below 0 is replaced by no read at all.
Called by `sparse.dsa` where the backend brings kernels. The twin is `reference.sparse_attention`.

Floor on one H200 (4.3 TB/s, 790 TFLOP/s in bf16), K slots a query, C + R = 576, C = 512:
bytes K * 656 (fp8) or K * 1152 (bf16) + H * 2176, operations 2 * H * K * 1088. At K = 2048 and 128
heads 0.72 us a query, bound by arithmetic; at 16 heads 0.32 us (fp8) and 0.56 us (bf16), bound by
memory.
"""

import torch
import triton.language as tl
from torch import Tensor

from . import few_heads, latent_hopper
from .fp8_rows import BLOCK
from .latent_rows import (
    RAISE,
    Queries,
    Rows,
    group_width,
    load_columns,
    load_rows,
)
from .launch import Tiling, ceil_div, jit, multiprocessors, power_of_two
from .online_softmax import add_values, combine, log_sum_exp, scores_of, weigh
from .splits import Processors


@jit
def _attend_slots(
    q_ptr,
    q_rope_ptr,
    latent_ptr,
    rope_ptr,
    scale_ptr,
    slots_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    heads,
    columns,
    parts,
    part_length,
    stride_q,
    stride_q_rope,
    stride_rows,
    stride_slots,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Blocks of heads that read the same rows are neighbours, so that one of them finds the rows in
    # the L2 cache.
    head_blocks = tl.cdiv(heads, BLOCK_H)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    part = tl.program_id(0) // head_blocks % parts
    token = (tl.program_id(0) // head_blocks // parts).to(tl.int64)
    is_head = (head < heads)[:, None]

    place = (token * heads + head)[:, None]
    q = load_columns(q_ptr + place * stride_q, is_head, 0, C, GROUP)
    q_rope = load_columns(q_rope_ptr + place * stride_q_rope, is_head, 0, R, BLOCK_R)
    acc = ()
    for _ in tl.static_range((C + GROUP - 1) // GROUP):
        acc = acc + (tl.zeros((BLOCK_H, GROUP), tl.float32),)
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)

    first = part * part_length
    count = tl.minimum(tl.load(counts_ptr + token).to(tl.int32), columns)
    last = tl.minimum(count, first + part_length)
    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = begin + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + token * stride_slots + n, mask=n < last, other=-1)
        seen = slot >= 0
        latent, rope = load_rows(
            latent_ptr,
            rope_ptr,
            scale_ptr,
            slot,
            stride_rows,
            seen,
            UNIT,
            C,
            R,
            GROUP,
            BLOCK_R,
            FP8,
        )
        scores = scores_of(q, latent, q_rope, rope, heads > 0, BLOCK_H == 64)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, shrink, largest, total = weigh(scores, largest, total)
        acc = add_values(weights.to(latent[0].dtype), shrink, latent, acc)

    lse, divisor = log_sum_exp(largest, total)
    place = (token * parts + part) * heads + head
    tl.store(lse_ptr + place, lse, mask=head < heads)
    # An empty part of several is not read, see `combine`.
    write = is_head & ((first < last) | (parts == 1))
    if FP8:
        divisor = divisor * RAISE
    for g in tl.static_range(len(acc)):
        c = g * GROUP + tl.arange(0, GROUP)[None, :]
        out = (acc[g] / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place[:, None] * C + c, out, mask=write & (c < C))


def sparse_tiling(queries: int, heads: int, rows_SX: Tensor, latent_width: int) -> Tiling:
    """For so many queries and heads over these cached rows: the fastest on an H200 of what compiles
    without spills."""
    is_fp8 = rows_SX.dtype == torch.uint8
    if latent_hopper.suits(rows_SX, latent_width):
        few = heads <= 32
        return few_heads.tiling(heads, is_fp8, queries) if few else latent_hopper.TILING
    if heads > 32:
        return Tiling(64, 64, BLOCK if is_fp8 else 256, 8, 2, 1)
    group = BLOCK if is_fp8 else 512
    if heads > 16:
        return Tiling(32, 64, group, 8, 3, 1)
    return Tiling(16, 32, group, 4, 3, 2)


def sparse_mla(
    q_THX: Tensor,
    rows_SX: Tensor,
    slots_TK: Tensor,
    counts_T: Tensor,
    latent_width: int,
    *,
    num_parts: int | None = None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Attended latents [T, H, C] in the queries' dtype and their natural LSE, fp32 [T, H].

    q_THX: absorbed queries with the scale folded in, contiguous, X = C + R. rows_SX: one layer's
    rows [S, C + R] of the queries' dtype, or uint8 [S, C + C / 32 + 2 R] fp8 rows; rows may lie
    further apart than they are wide. slots_TK: int32 or int64; an entry counts when its column is
    below counts_T[t] (int32 or int64) and it is not negative. A query without any gives zeros and
    -inf, and may be NaN itself. num_parts: programs that share a query's slots; None: as many as
    fill the GPU. tiling: None: as `sparse_tiling` says.
    Raises ValueError or TypeError for other shapes and dtypes.
    """
    tokens, heads, width = q_THX.shape
    _require(q_THX, rows_SX, slots_TK, counts_T)
    rows = Rows.of(rows_SX, latent_width, width - latent_width)
    tiling = tiling or sparse_tiling(tokens, heads, rows_SX, latent_width)
    q = Queries.of(q_THX, latent_width, rows.is_fp8 and not tiling.by_hand)
    head_blocks = ceil_div(heads, tiling.rows)
    tiles = ceil_div(slots_TK.shape[1], tiling.keys)
    if num_parts is None:
        at_once = multiprocessors(q_THX.device) * tiling.programs
        processors = Processors(at_once, head_blocks, tiling.keys)
        num_parts = ceil_div(tiles, processors.tiles_per_part({tiles: tokens}))
    out_THC = q_THX.new_empty(tokens, heads, latent_width)
    lse_TH = q_THX.new_empty(tokens, heads, dtype=torch.float32)
    part_THC, part_lse_TH = out_THC, lse_TH
    if num_parts > 1:
        part_THC = lse_TH.new_empty(tokens * num_parts, heads, latent_width)
        part_lse_TH = lse_TH.new_empty(tokens * num_parts, heads)
    if not tokens:
        return out_THC, lse_TH
    work = (rows, slots_TK, counts_T, part_THC, part_lse_TH, num_parts)
    if tiling.by_hand and tiling.rows <= 32:
        few_heads.attend_slots(q_THX, *work, tiling)
    elif tiling.by_hand:
        latent_hopper.attend_slots(q, *work)
    else:
        _launch(q, *work, tiling)
    if num_parts > 1:
        combine(part_THC, part_lse_TH, num_parts, out_THC, lse_TH)
    return out_THC, lse_TH


def _launch(
    q: Queries, rows: Rows, slots_TK: Tensor, counts_T: Tensor, out: Tensor, lse: Tensor,
    parts: int, tiling: Tiling,
) -> None:  # fmt: skip
    tokens, heads, latent_width = q.latent.shape
    rope_width = q.rope.shape[2]
    tiles = ceil_div(slots_TK.shape[1], tiling.keys)
    _attend_slots[(tokens * parts * ceil_div(heads, tiling.rows),)](
        q.latent,
        q.rope,
        rows.latent_SC,
        rows.rope_SR,
        rows.scales_SG,
        slots_TK,
        counts_T,
        out,
        lse,
        heads,
        slots_TK.shape[1],
        parts,
        ceil_div(tiles, parts) * tiling.keys,
        q.latent.stride(1),
        q.rope.stride(1),
        rows.stride,
        slots_TK.stride(0),
        rows.unit,
        latent_width,
        rope_width,
        group_width(latent_width, tiling.group),
        max(16, power_of_two(rope_width)),
        tiling.rows,
        tiling.keys,
        rows.is_fp8,
        tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def _require(q_THX: Tensor, rows_SX: Tensor, slots_TK: Tensor, counts_T: Tensor) -> None:
    if rows_SX.dtype not in (torch.uint8, q_THX.dtype):
        raise TypeError(f"the queries are {q_THX.dtype}, the cached rows {rows_SX.dtype}")
    if not len(slots_TK) == len(counts_T) == len(q_THX) or slots_TK.stride(1) != 1:
        raise ValueError(
            f"{len(q_THX)} queries need as many dense rows of slots and counts, got "
            f"{len(slots_TK)} with stride {slots_TK.stride(1)} and {len(counts_T)}"
        )
    if not q_THX.is_contiguous():
        raise ValueError("the queries must be contiguous")
