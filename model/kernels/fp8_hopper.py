"""Many fp8 rows times block-scaled fp8 weights on Hopper, by hand: one weight, or one of many.

The products of `fp8_linear` and `fp8_experts` for prompts, where the tensor cores are what counts.
Three warp groups share a program, which stays and takes tile after tile of 128 rows times 256 rows
of the weight. One fetches: rows of x one by one, since they may lie anywhere, the weight as two
tiles of 128. The other two multiply 64 rows each. A block of 128 columns is a product of its own,
because its scales are; while one group adds a block's product to its sums the tensor cores work for
the other one, and while both write a tile the next one is fetched.

With SWIGLU the two tiles are those of the same columns of gate and up, so that silu(gate) * up has
all of a group of 128 columns and leaves the program in fp8.

The twins are those of `fp8_linear` and `fp8_experts`; sums have the same order as there.
"""

# To a type checker a kernel's constants, layouts and ranges are objects of other types than the
# compiler makes of them.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false

from typing import Any, cast

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...attention.kernels.fp8_rows import AMAX_FLOOR, FP8_MAX
from ...attention.kernels.launch import ceil_div, multiprocessors
from ..fp8 import Fp8Weights
from .expert_groups import Groups
from .fp8_rows import GROUP, Fp8Rows

ROWS, WEIGHT_ROWS, STAGES = 128, 256, 4
# Tiles of rows that are taken together before the next ones of the weight.
TOGETHER = 8
# Of a thread of the second multiplying and of the fetching warp group.
REGISTERS = gl.constexpr((216, 72))
_FLOOR = gl.constexpr(AMAX_FLOOR)
_LARGEST = gl.constexpr(FP8_MAX)
# Triton 3.7 renamed it.
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier  # pyright: ignore
# To a type checker a kernel is anything, as in `launch`.
_jit = cast(Any, gluon.jit)


def suits(x: Fp8Rows, rows: int) -> bool:
    """Whether a weight of so many rows may be multiplied here: Hopper, rows a multiple of 8."""
    values = x.values_TD
    is_hopper = values.is_cuda and torch.cuda.get_device_capability(values.device)[0] == 9
    return is_hopper and rows % 8 == 0


@_jit
def _tile(index, tiles_ptr, num_tiles, tiles_e, DENSE: gl.constexpr, TOGETHER: gl.constexpr):
    """Expert, first place, end and tile of the weight of the program's turn."""
    first_tile = index // (TOGETHER * tiles_e) * TOGETHER
    height = gl.minimum(num_tiles - first_tile, TOGETHER)
    within = index - first_tile * tiles_e
    tile = first_tile + within % height
    tile_e = within // height
    if DENSE:
        expert = tile * 0
        first = tile * 128
        last = first + 128
    else:
        expert = gl.load(tiles_ptr + tile * 3)
        first = gl.load(tiles_ptr + tile * 3 + 1)
        last = gl.load(tiles_ptr + tile * 3 + 2)
    return expert, first, last, tile_e


@_jit
def _source(order_ptr, place, last, chosen, DENSE: gl.constexpr):
    """The row of x at each place; behind the last one its row again."""
    place = gl.minimum(place, last - 1)
    row = place
    if not DENSE and chosen > 0:
        row = gl.load(order_ptr + place) // chosen
    return row


@_jit
def _weight_blocks(tile_e, eighths, SWIGLU: gl.constexpr):
    """Which blocks of 128 rows of the weight the two halves of a tile are."""
    if SWIGLU:
        first = tile_e
        second = eighths // 32 + tile_e
    else:
        first = tile_e * 2
        second = first + 1
    return first, second


@_jit
def _fetch(
    x_ptr, w_desc, order_ptr, tiles_ptr, num_tiles, tiles_e, tokens, eighths, blocks, chosen,
    tiles, barriers,
    SWIGLU: gl.constexpr, DENSE: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """The fetching warp group."""
    x, w = tiles
    full, empty = barriers
    of_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])  # pyright: ignore
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows))
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows)), 0)
    turn = 0
    for index in range(gl.program_id(0), num_tiles * tiles_e, gl.num_programs(0)):
        expert, first, last, tile_e = _tile(index, tiles_ptr, num_tiles, tiles_e, DENSE, TOGETHER)
        if DENSE:
            last = gl.minimum(last, tokens)
        if expert >= 0:
            upper = _source(order_ptr, first + m, last, chosen, DENSE).to(gl.int64)
            lower = _source(order_ptr, first + 64 + m, last, chosen, DENSE).to(gl.int64)
            upper_ptr = x_ptr + gl.expand_dims(upper * blocks * 128, 1) + column
            lower_ptr = x_ptr + gl.expand_dims(lower * blocks * 128, 1) + column
            block_a, block_b = _weight_blocks(tile_e, eighths, SWIGLU)
            row_a = expert * eighths * 8 + block_a * 128
            row_b = expert * eighths * 8 + block_b * 128
            for block in range(blocks):
                stage = turn % STAGES
                mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                ready = full.index(stage)
                begin = block * 128
                mbarrier.expect(ready, 2 * 128 * 128)
                tma.async_copy_global_to_shared(w_desc, [row_a, begin], ready, w.index(stage * 2))
                tma.async_copy_global_to_shared(
                    w_desc, [row_b, begin], ready, w.index(stage * 2 + 1)
                )
                async_copy.async_copy_global_to_shared(x.index(stage * 2), upper_ptr + begin)
                async_copy.async_copy_global_to_shared(x.index(stage * 2 + 1), lower_ptr + begin)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                turn += 1


@_jit
def _add(acc, product, x_scale, w_scale):
    scale = gl.expand_dims(x_scale * w_scale, 1)
    return acc + product * scale


@_jit
def _multiply(
    x_scale_ptr, w_scale_ptr, order_ptr, tiles_ptr, out_ptr, out_scale_ptr,
    num_tiles, tiles_e, tokens, eighths, blocks, w_scale_stride, chosen, places,
    tiles, barriers, room,
    HALF: gl.constexpr, SWIGLU: gl.constexpr, DENSE: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: rows 64 * HALF and so on of each tile."""
    x, w = tiles
    full, empty = barriers
    mma: gl.constexpr = gl.NVMMADistributedLayout(  # pyright: ignore
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    of_row: gl.constexpr = gl.SliceLayout(1, mma)
    m = HALF * 64 + gl.arange(0, 64, layout=of_row)
    zeros = gl.zeros((64, 128), gl.float32, mma)
    weight_blocks = (eighths + 15) // 16
    turn = 0
    for index in range(gl.program_id(0), num_tiles * tiles_e, gl.num_programs(0)):
        expert, first, last, tile_e = _tile(index, tiles_ptr, num_tiles, tiles_e, DENSE, TOGETHER)
        if DENSE:
            last = gl.minimum(last, tokens)
        if expert >= 0:
            block_a, block_b = _weight_blocks(tile_e, eighths, SWIGLU)
            scales = w_scale_ptr + expert.to(gl.int64) * weight_blocks * w_scale_stride
            scales_a = scales + block_a * w_scale_stride
            # Behind the last row of the weight nothing is stored.
            scales_b = scales + gl.minimum(block_b, weight_blocks - 1) * w_scale_stride
            row_scales = x_scale_ptr + _source(order_ptr, first + m, last, chosen, DENSE)
            x_scale = gl.load(row_scales)
            scale_a = gl.load(scales_a)
            scale_b = gl.load(scales_b)
            acc_a = zeros
            acc_b = zeros
            for block in range(blocks):
                stage = turn % STAGES
                following = gl.minimum(block + 1, blocks - 1)
                next_x_scale = gl.load(row_scales + following.to(gl.int64) * tokens)
                next_a = gl.load(scales_a + following)
                next_b = gl.load(scales_b + following)
                mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                fence_async_shared()
                rows = x.index(stage * 2 + HALF)
                product = warpgroup_mma(
                    rows, w.index(stage * 2).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                product = warpgroup_mma_wait(0, deps=(product,))
                acc_a = _add(acc_a, product, x_scale, scale_a)
                product = warpgroup_mma(
                    rows, w.index(stage * 2 + 1).permute((1, 0)), zeros, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                product = warpgroup_mma_wait(0, deps=(product,))
                _barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                acc_b = _add(acc_b, product, x_scale, scale_b)
                x_scale = next_x_scale
                scale_a = next_a
                scale_b = next_b
                turn += 1
            if SWIGLU:
                _store_product(
                    out_ptr, out_scale_ptr, acc_a, acc_b, first, last, tile_e, eighths, places,
                    room, HALF,
                )  # fmt: skip
            else:
                back = order_ptr
                ordered: gl.constexpr = not DENSE
                _store(
                    out_ptr, back, acc_a, first, last, tile_e * 256, eighths, chosen, room, HALF,
                    ordered,
                )  # fmt: skip
                _store(
                    out_ptr, back, acc_b, first, last, tile_e * 256 + 128, eighths, chosen, room,
                    HALF, ordered,
                )  # fmt: skip


@_jit
def _store(
    out_ptr, order_ptr, acc, first, last, first_e, eighths, chosen, room,
    HALF: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """128 columns of the products, turned in shared memory into whole rows."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # pyright: ignore
    # The rows before have been read.
    _barrier()
    room.index(HALF).store(acc.to(out_ptr.dtype.element_ty))
    _barrier()
    values = room.index(HALF).load(of_rows)
    place = first + HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows))
    target = place
    if ORDERED and chosen == 0:
        target = gl.load(order_ptr + place, mask=place < last, other=0)
    e = first_e + gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows))
    row = gl.expand_dims(target.to(gl.int64) * eighths * 8, 1)
    mask = gl.expand_dims(place < last, 1) & gl.expand_dims(e < eighths * 8, 0)
    gl.store(out_ptr + row + gl.expand_dims(e, 0), values, mask=mask)


@_jit
def _store_product(
    out_ptr, scale_ptr, gate, up, first, last, tile_e, eighths, places, room, HALF: gl.constexpr
):
    """silu(gate) * up of 128 columns in fp8, as `fp8_rows` makes it of what is rounded to bf16."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])  # pyright: ignore
    of_row: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    silu = gate * (1.0 / (1.0 + gl.exp(-gate)))
    rows = silu * up
    scale = gl.div_rn(gl.maximum(gl.max(gl.abs(rows), 1), _FLOOR), _LARGEST)
    rows = gl.div_rn(rows, gl.expand_dims(scale, 1))
    rows = gl.minimum(gl.maximum(rows, -_LARGEST), _LARGEST).to(gl.float8e4nv)
    place = first + HALF * 64 + gl.arange(0, 64, layout=of_row)
    gl.store(scale_ptr + tile_e.to(gl.int64) * places + place, scale, mask=place < last)
    _barrier()
    room.index(HALF).store(rows)
    _barrier()
    values = room.index(HALF).load(of_rows)
    place = first + HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows))
    e = tile_e * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows))
    row = gl.expand_dims(place.to(gl.int64) * eighths * 4, 1)
    gl.store(out_ptr + row + gl.expand_dims(e, 0), values, mask=gl.expand_dims(place < last, 1))


@_jit
def _products(
    x_ptr, x_scale_ptr, w_desc, w_scale_ptr, order_ptr, tiles_ptr, out_ptr, out_scale_ptr,
    num_tiles, tiles_e, tokens, eighths, blocks, w_scale_stride, chosen, places,
    SWIGLU: gl.constexpr, DENSE: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Products of `tokens` rows; eighths: an eighth of the rows of the (expert's) weight."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(  # pyright: ignore
        swizzle_byte_width=128, element_bitwidth=8, rank=2
    )
    out_type: gl.constexpr = out_ptr.dtype.element_ty
    of_room: gl.constexpr = gl.NVMMASharedLayout(  # pyright: ignore
        swizzle_byte_width=128, element_bitwidth=out_type.primitive_bitwidth, rank=2
    )
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 64, 128], swizzled)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 128, 128], w_desc.layout)
    room = gl.allocate_shared_memory(out_type, [2, 64, 128], of_room)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every fetching thread says when its own copies are done, one also for the weight's.
        mbarrier.init(full.index(stage), count=129)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    tiles = (x, w)
    barriers = (full, empty)
    UPPER: gl.constexpr = 0
    LOWER: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (
                x_scale_ptr, w_scale_ptr, order_ptr, tiles_ptr, out_ptr, out_scale_ptr,
                num_tiles, tiles_e, tokens, eighths, blocks, w_scale_stride, chosen, places,
                tiles, barriers, room, UPPER, SWIGLU, DENSE, STAGES, TOGETHER,
            )),
            (_multiply, (
                x_scale_ptr, w_scale_ptr, order_ptr, tiles_ptr, out_ptr, out_scale_ptr,
                num_tiles, tiles_e, tokens, eighths, blocks, w_scale_stride, chosen, places,
                tiles, barriers, room, LOWER, SWIGLU, DENSE, STAGES, TOGETHER,
            )),
            (_fetch, (
                x_ptr, w_desc, order_ptr, tiles_ptr, num_tiles, tiles_e, tokens, eighths, blocks,
                chosen, tiles, barriers, SWIGLU, DENSE, STAGES, TOGETHER,
            )),
        ],
        [4, 4],
        REGISTERS,
    )  # fmt: skip


def hopper_linear(x: Fp8Rows, weight_ED: Tensor, scales: Tensor, out_TE: Tensor) -> Tensor:
    """As `fp8_linear`, into out_TE in bf16 or fp16."""
    tiles = ceil_div(len(x.values_TD), ROWS)
    _launch(x, weight_ED, scales, out_TE, None, tiles, 0)
    return out_TE


def hopper_experts(
    x: Fp8Rows, weights: Fp8Weights, groups: Groups, chosen: int, out: Tensor | Fp8Rows
) -> None:
    """As `grouped_product`, for groups with tiles of 128 rows.

    out: bf16 or fp16 [P, E]; or, where the weight's rows are those of gate, then up, fp8 rows
    [P, E / 2] of silu(gate) * up.
    """
    if groups.tile_rows != ROWS:
        raise ValueError(f"groups are cut into tiles of {ROWS} rows here, not {groups.tile_rows}")
    values_ED = weights.values_XED.flatten(0, 1)
    _launch(x, values_ED, weights.scales_XBB, out, groups, len(groups.tiles_N3), chosen)


def _launch(
    x: Fp8Rows,
    weight_ED: Tensor,
    scales: Tensor,
    out: Tensor | Fp8Rows,
    groups: Groups | None,
    tiles: int,
    chosen: int,
) -> None:
    values, scales_out = (
        (out.values_TD, out.scales_GT) if isinstance(out, Fp8Rows) else (out, x.scales_GT)
    )
    rows = values.shape[1] * (2 if isinstance(out, Fp8Rows) else 1)
    tiles_e = ceil_div(rows, WEIGHT_ROWS)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    _products[(min(multiprocessors(weight_ED.device), tiles * tiles_e),)](
        x.values_TD,
        x.scales_GT,
        TensorDescriptor.from_tensor(weight_ED, [128, 128], layout),
        scales,
        groups.order_P if groups else x.scales_GT,
        groups.tiles_N3 if groups else x.scales_GT,
        values,
        scales_out,
        tiles,
        tiles_e,
        len(x.values_TD),
        rows // 8,
        weight_ED.shape[1] // GROUP,
        scales.stride(-2),
        chosen,
        len(values),
        SWIGLU=isinstance(out, Fp8Rows),
        DENSE=groups is None,
        STAGES=STAGES,
        TOGETHER=TOGETHER,
        num_warps=4,
    )
