"""Latent attention of 64 query rows on Hopper: the work of `sparse_mla` and `mla_decode`, by hand.

Three warp groups share a program. One fetches rows, two multiply: each scores every other tile of
64 keys and keeps half of the columns of all sums, so the weights of a tile pass from the group that
made them to the other one through shared memory. While one group is at its softmax the tensor cores
work for the other (the schedule of FlashMLA's kernels for Hopper, Li and others, 2025).

Shared memory holds the queries and two tiles, no more: a quarter of 64 keys times 256 columns
(a "half" of a tile) is given back as soon as its last product is done, and a tile's weights lie
where its rotary part was.

Both callers differ in where a key's slot stands: in a list of slots (PAGE = 0) or in a row of the
block table. Rows come in 16 bits or in fp8; `latent_hopper_rows.py` fetches them, and converts the
latter to fp16, which takes a fourth warp group.

The floors are told in `sparse_mla.py` and `mla_decode.py`. Measured on an H200 at 128 heads, of
FlashMLA's times: decode over 2048 slots 0.90 (64 and 128 requests; 0.7 for rows of 16 bits, which
FlashMLA does not take), prefill 0.92, dense decode 1.00.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import constexpr

from .latent_hopper_rows import CONVERTING, COPYING, barrier, group_of, serve
from .latent_hopper_softmax import LOG2E, all_count, base_of, hide, reference, scale, shrink_sums
from .latent_rows import RAISE, Queries, Rows
from .launch import Tiling, ceil_div

# To a type checker kernels and what they are written in are anything, as in `launch`.
gl: Any = language
_jit: Any = gluon.jit

LATENT, ROPE = 512, 64
# Values, four scales and the rotary part, in bytes.
FP8_WIDTH = LATENT + 4 * 4 + 2 * ROPE
# Query rows of a program; keys come in pairs of tiles of 64.
TILING = Tiling(64, 128, 256, 4, 2, 1, by_hand=True)
# Of a thread of the second multiplying and of a fetching warp group.
REGISTERS = gl.constexpr((216, 64))
REGISTERS_FP8 = gl.constexpr((200, 56))
# The multiplying warp groups.
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
LN2 = gl.constexpr(0.6931471805599453)


def suits(rows_SX: Tensor, latent_width: int) -> bool:
    """Rows of 512 + 64 elements, 16 bits each or in fp8, that begin at multiples of 16 bytes, on a
    GPU of compute capability 9."""
    widths = {torch.bfloat16: LATENT + ROPE, torch.float16: LATENT + ROPE, torch.uint8: FP8_WIDTH}
    usual = latent_width == LATENT and rows_SX.shape[1] == widths.get(rows_SX.dtype)
    aligned = rows_SX.stride(0) * rows_SX.itemsize % 16 == 0 == rows_SX.data_ptr() % 16
    is_hopper = rows_SX.is_cuda and torch.cuda.get_device_capability(rows_SX.device)[0] == 9
    return usual and aligned and is_hopper


def attend_slots(
    q: Queries, rows: Rows, slots_TK: Tensor, counts_T: Tensor, out: Tensor, lse: Tensor, parts: int
) -> None:
    """As the kernel of `sparse_mla`: `parts` programs share a query's slots."""
    tokens, heads, _ = q.latent.shape
    q_rope = q.rope.to(rows.rope_SR.dtype)
    columns = slots_TK.shape[1]
    _attend[(tokens * parts * ceil_div(heads, 64),)](
        q.latent, q_rope, rows.latent_SC, rows.rope_SR, rows.scales_SG, slots_TK, counts_T,
        counts_T, out, lse, heads, heads, columns, parts,
        ceil_div(ceil_div(columns, TILING.keys), parts) * TILING.keys,
        q.latent.stride(1), q_rope.stride(1), rows.stride, slots_TK.stride(0),
        PAGE=0, FP8=rows.is_fp8, num_warps=TILING.num_warps,
    )  # fmt: skip


def attend_pages(
    q: Queries, rows: Rows, table_BP: Tensor, page_size: int, lengths_B: Tensor, parts_W3: Tensor,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """As the kernel of `mla_decode`."""
    tokens, heads, _ = q.latent.shape
    q_rope = q.rope.to(rows.rope_SR.dtype)
    query_rows = tokens // len(table_BP) * heads
    _attend[(len(parts_W3) * ceil_div(query_rows, 64),)](
        q.latent, q_rope, rows.latent_SC, rows.rope_SR, rows.scales_SG, table_BP, lengths_B,
        parts_W3, out, lse, query_rows, heads, 0, 0, 0,
        q.latent.stride(1), q_rope.stride(1), rows.stride, table_BP.stride(0),
        PAGE=page_size, FP8=rows.is_fp8, num_warps=TILING.num_warps,
    )  # fmt: skip


@_jit
def _nought(i):
    """0, which the compiler cannot know: it would keep where tiles lie in 90 registers."""
    return i >> 30


@_jit
def _scores(q, q_rope, latent, rope, full, i, zeros, TILE: constexpr):
    """The products of all queries and the keys of a tile, under way as its halves arrive."""
    phase = i & 1
    nought = _nought(i)
    scores = zeros
    for k in gl.static_range(2):
        half = group_of(TILE, 2 * k) // 2
        mbarrier.wait(full.index(2 * TILE + half), phase)
        fence_async_shared()
        keys = latent.index(nought + 2 * TILE + half).permute((1, 0))
        scores = warpgroup_mma(q.index(nought + half), keys, scores, use_acc=k > 0, is_async=True)
    return warpgroup_mma(
        q_rope.index(nought), rope.index(nought + TILE).permute((1, 0)), scores, is_async=True
    )


@_jit
def _give_back(acc, empty, AT: constexpr):
    """Wait for the product with a half of a tile, which may then be filled anew."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    barrier()
    mbarrier.arrive(empty.index(AT), count=1)
    return acc


@_jit
def _lower_queries(q_ptr, q, rows_left, stride_q, TILE: constexpr):
    """Half TILE of the queries in fp16, lowered as `latent_rows.Queries` says."""
    of_rows: constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows)).to(gl.int64), 1)
    column = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, of_rows)), 0)
    half = gl.load(q_ptr + m * stride_q + (column + 256 * TILE), mask=m < rows_left, other=0.0)
    q.index(TILE).store((half.to(gl.float32) * (1.0 / RAISE)).to(gl.float16))


@_jit
def _multiply(
    q_ptr, stride_q, source_ptr, out_ptr, lse_ptr, place, rows_left, first, last, bound, slope,
    heads, pairs, write, tiles, barriers, largest_of, total_of,
    TILE: constexpr, PAGE: constexpr, FP8: constexpr,
):  # fmt: skip
    """A multiplying warp group: scores of tile TILE of each pair, half TILE of the sums."""
    q, q_rope, latent, rope = tiles
    full, empty, ready, q_full = barriers
    of_scores: constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    of_sums: constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128 if FP8 else 256, 16]
    )
    of_weights: constexpr = gl.DotOperandLayout(0, of_sums, 2)
    row: constexpr = gl.SliceLayout(1, of_scores)
    zeros = gl.zeros((64, 64), gl.float32, of_scores)
    acc = gl.zeros((64, 256), gl.float32, of_sums)
    largest = gl.full((64,), float("-inf"), gl.float32, row)
    total = gl.zeros((64,), gl.float32, row)
    m = gl.arange(0, 64, layout=row)
    # Behind the last key of a part, or behind the key of the row's own token.
    visible = gl.minimum(last, bound + (m + slope) // heads)
    visible_first = gl.minimum(last, bound + slope // heads)
    dtype: constexpr = latent.dtype
    weights_of = rope._reinterpret(dtype, [2, 64, 64], rope.layout)
    if FP8:
        _lower_queries(q_ptr, q, rows_left, stride_q, TILE)
        fence_async_shared()
        barrier()
        mbarrier.arrive(q_full, count=1)
    mbarrier.wait(q_full, 0)
    for i in range(pairs):
        phase = i & 1
        begin = first + i * 128 + TILE * 64
        scores = _scores(q, q_rope, latent, rope, full, i, zeros, TILE)
        # Not before the products are under way: their fences wait for loads.
        whole = all_count(source_ptr, begin, last, visible_first, PAGE)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if not whole:
            scores = hide(scores, source_ptr, begin, last, visible, PAGE)
        reached = gl.max(scores, 1) * LOG2E
        nought = _nought(i)
        if TILE == 0:
            reached = reference(largest, reached)
            base = base_of(reached)
            shrink = gl.exp2(largest - base)
        else:
            mbarrier.wait(ready.index(0), phase)
            before = largest_of.index(0).load(row)
            shrink = gl.exp2(largest - base_of(before))
            total = total * shrink
            acc = shrink_sums(acc, shrink)
            acc = warpgroup_mma(
                weights_of.index(nought), latent.index(nought + 1), acc, is_async=True
            )
            reached = reference(before, reached)
            base = base_of(reached)
            shrink = gl.exp2(before - base)
        weights = gl.exp2(scores * LOG2E - gl.expand_dims(base, 1))
        largest = reached
        rounded = weights.to(dtype)
        # All warps have read the rotary part.
        barrier()
        weights_of.index(TILE).store(rounded)
        largest_of.index(TILE).store(largest)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(TILE), count=1)
        if TILE == 1:
            acc = _give_back(acc, empty, 1)
        acc = shrink_sums(acc, shrink)
        own = latent.index(nought + 3 * TILE)
        acc = warpgroup_mma(gl.convert_layout(rounded, of_weights), own, acc, is_async=True)
        # While that is multiplied.
        total = total * shrink + gl.sum(weights, 1)
        acc = _give_back(acc, empty, 3 * TILE)
        if TILE == 0:
            mbarrier.wait(ready.index(1), phase)
            reached = largest_of.index(1).load(row)
            shrink = gl.exp2(largest - base_of(reached))
            total = total * shrink
            largest = reached
            acc = shrink_sums(acc, shrink)
            acc = warpgroup_mma(
                weights_of.index(nought + 1), latent.index(nought + 2), acc, is_async=True
            )
            acc = _give_back(acc, empty, 2)

    total_of.index(TILE).store(total)
    barrier()
    mbarrier.arrive(ready.index(2 + TILE), count=1)
    mbarrier.wait(ready.index(3 - TILE), 0)
    total += total_of.index(1 - TILE).load(row)
    some = total > 0.0
    divisor = gl.where(some, total, 1.0)
    if TILE == 0:
        lse = gl.where(some, (largest + gl.log2(divisor)) * LN2, float("-inf"))
        gl.store(lse_ptr + place + m, lse, mask=m < rows_left)
    if FP8:
        divisor = divisor * RAISE
    acc = scale(acc, 1.0 / divisor)
    out_type: constexpr = out_ptr.dtype.element_ty
    if out_type == gl.float32:
        _store(out_ptr, acc, place, rows_left, write, TILE)
    else:
        # This half of tile 0 has no other readers any more.
        room = latent.index(TILE)._reinterpret(out_type, [64, 256], latent.layout)
        room.store(acc.to(out_type))
        of_rows: constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        barrier()
        _store(out_ptr, room.load(of_rows), place, rows_left, write, TILE)


@_jit
def _store(out_ptr, values, place, rows_left, write, TILE: constexpr):
    layout: constexpr = values.type.layout
    m = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, layout)), 0)
    gl.store(out_ptr + (place + m) * 512 + (c + 256 * TILE), values, mask=(m < rows_left) & write)


@_jit
def _attend(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, scale_ptr, source_ptr, bounds_ptr, parts_ptr,
    out_ptr, lse_ptr, rows, heads, columns, parts, part_length,
    stride_q, stride_q_rope, stride, stride_source,
    PAGE: constexpr, FP8: constexpr,
):  # fmt: skip
    """A program takes 64 rows of a query (request) and a part of its keys."""
    row_blocks = gl.cdiv(rows, 64)
    block = gl.program_id(0) % row_blocks
    part = gl.program_id(0) // row_blocks
    if PAGE == 0:
        own = part // parts
        first = part % parts * part_length
        last = gl.minimum(gl.load(bounds_ptr + own).to(gl.int32), columns)
        last = gl.minimum(last, first + part_length)
        bound = columns
        rows_left = rows - block * 64
        # An empty part of several is not read, see `combine`.
        write = (first < last) | (parts == 1)
    else:
        own = gl.load(parts_ptr + part * 3)
        first = gl.load(parts_ptr + part * 3 + 1)
        last = gl.load(parts_ptr + part * 3 + 2)
        write = own >= 0
        rows_left = gl.where(write, rows - block * 64, 0)
        own = gl.maximum(own, 0)
        bound = gl.load(bounds_ptr + own) - rows // heads + 1
    own = own.to(gl.int64)
    source_ptr += own * stride_source
    q_ptr += (own * rows + block * 64) * stride_q
    q_rope_ptr += (own * rows + block * 64) * stride_q_rope
    place = part.to(gl.int64) * rows + block * 64
    pairs = (gl.maximum(last - first, 0) + 127) // 128

    swizzled: constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: constexpr = gl.float16 if FP8 else latent_ptr.dtype.element_ty
    rope_type: constexpr = rope_ptr.dtype.element_ty
    q = gl.allocate_shared_memory(dtype, [2, 64, 256], swizzled)
    q_rope = gl.allocate_shared_memory(rope_type, [1, 64, 64], swizzled)
    latent = gl.allocate_shared_memory(dtype, [4, 64, 256], swizzled)
    rope = gl.allocate_shared_memory(rope_type, [2, 64, 64], swizzled)
    largest_of = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    total_of = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    warps: constexpr = CONVERTING if FP8 else COPYING
    threads: constexpr = 32 * warps
    for at in gl.static_range(4):
        # Every fetching thread says when its own copies are done; then what it converted is, too.
        mbarrier.init(full.index(at), count=threads + 1 if FP8 else threads)
        mbarrier.init(empty.index(at), count=1)
        mbarrier.init(ready.index(at), count=1)
    mbarrier.init(q_full, count=threads + 2 if FP8 else threads)
    fence_async_shared()
    tiles = (q, q_rope, latent, rope)
    barriers = (full, empty, ready, q_full)
    gl.warp_specialize(
        [
            (_multiply, (
                q_ptr, stride_q, source_ptr, out_ptr, lse_ptr, place, rows_left, first, last, bound,
                block * 64, heads, pairs, write, tiles, barriers, largest_of, total_of, FIRST,
                PAGE, FP8,
            )),
            (_multiply, (
                q_ptr, stride_q, source_ptr, out_ptr, lse_ptr, place, rows_left, first, last, bound,
                block * 64, heads, pairs, write, tiles, barriers, largest_of, total_of, SECOND,
                PAGE, FP8,
            )),
            (serve, (
                q_ptr, q_rope_ptr, latent_ptr, rope_ptr, scale_ptr, source_ptr, rows_left, first,
                last, pairs, stride_q, stride_q_rope, stride, tiles, barriers, PAGE, FP8,
            )),
        ],
        [4, warps],
        REGISTERS_FP8 if FP8 else REGISTERS,
    )  # fmt: skip
