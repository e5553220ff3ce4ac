"""Many fp8 rows times block-scaled fp8 weights on Hopper, by hand: one weight, or one of many.

The products of `fp8_linear` and `fp8_experts` for prompts, where the tensor cores are what counts.
Three warp groups share a program, which stays and takes tile after tile of 128 rows times 256 rows
of the weight. One fetches: the weight as two tiles of 128, and rows of x by the copy engine as
well, or one by one where they may lie anywhere. The other two multiply 64 rows each, and a group
without a row in the tile does nothing. A block of 128 columns is a product of its own, because its
scales are. While one group adds a product to its sums the tensor cores work for the other one, and
while both write a tile the next one is fetched. What limits it is the way from the L2 cache: rows
that a tile does not have are not fetched.

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

from ...attention.kernels.launch import ceil_div, multiprocessors
from ..fp8 import Fp8Weights
from .expert_groups import Groups
from .fp8_hopper_stores import store_rows, store_silu_product
from .fp8_rows import GROUP, Fp8Rows

ROWS, WEIGHT_ROWS = 128, 256
STAGES = gl.constexpr(4)
# Tiles of rows that are taken together before the next ones of the weight.
TOGETHER = gl.constexpr(8)
# Of a thread of the second multiplying and of the fetching warp group.
REGISTERS = gl.constexpr((216, 72))
_copy_tile = tma.async_copy_global_to_shared
_copy_rows = async_copy.async_copy_global_to_shared
# To a type checker a kernel is anything, as in `launch`.
_jit = cast(Any, gluon.jit)
# One kernel for all numbers of rows and experts.
_SIZES = (
    "num_tiles", "tiles_e", "tokens", "eighths", "blocks", "w_scale_stride", "chosen", "places",
)  # fmt: skip
_jit_of_any_size = cast(Any, gluon.jit(do_not_specialize=_SIZES))


def suits(x: Fp8Rows, rows: int) -> bool:
    """Whether a weight of so many rows may be multiplied here: Hopper, rows a multiple of 8."""
    values = x.values_TD
    is_hopper = values.is_cuda and torch.cuda.get_device_capability(values.device)[0] == 9
    return is_hopper and rows % 8 == 0


@_jit
def _tile(index, tiles_ptr, sizes, KIND: gl.constexpr):
    """Expert, first place, end and tile of the weight of the program's turn."""
    num_tiles, tiles_e, tokens, _, _, _, _, _ = sizes
    first_tile = index // (TOGETHER * tiles_e) * TOGETHER
    height = gl.minimum(num_tiles - first_tile, TOGETHER)
    within = index - first_tile * tiles_e
    tile = first_tile + within % height
    tile_e = within // height
    if KIND == "one":
        expert = tile * 0
        first = tile * 128
        last = gl.minimum(first + 128, tokens)
    else:
        expert = gl.load(tiles_ptr + tile * 3)
        first = gl.load(tiles_ptr + tile * 3 + 1)
        last = gl.load(tiles_ptr + tile * 3 + 2)
    return expert, first, last, tile_e


@_jit
def _source(order_ptr, place, last, chosen, KIND: gl.constexpr):
    """The row of x at each place; behind the last one its row again."""
    place = gl.minimum(place, last - 1)
    row = place
    if KIND == "gather":
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
def _fetch(sources, sizes, tiles, barriers, SWIGLU: gl.constexpr, KIND: gl.constexpr):
    """The fetching warp group."""
    x_ptr, x_desc, w_desc, order_ptr, tiles_ptr = sources
    num_tiles, tiles_e, _, eighths, blocks, _, chosen, _ = sizes
    x, w = tiles
    full, empty = barriers
    of_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows))
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows)), 0)
    turn = 0
    for index in range(gl.program_id(0), num_tiles * tiles_e, gl.num_programs(0)):
        expert, first, last, tile_e = _tile(index, tiles_ptr, sizes, KIND)
        if expert >= 0:
            both = first + 64 < last
            if KIND == "gather":
                upper = _source(order_ptr, first + m, last, chosen, KIND).to(gl.int64)
                lower = _source(order_ptr, first + 64 + m, last, chosen, KIND).to(gl.int64)
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
                if KIND == "gather":
                    mbarrier.expect(ready, 2 * 128 * 128)
                    _copy_rows(x.index(stage * 2), upper_ptr + begin)
                    if both:
                        _copy_rows(x.index(stage * 2 + 1), lower_ptr + begin)
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                elif both:
                    mbarrier.expect(ready, 3 * 128 * 128)
                    _copy_tile(x_desc, [first, begin], ready, x.index(stage * 2))
                    _copy_tile(x_desc, [first + 64, begin], ready, x.index(stage * 2 + 1))
                else:
                    mbarrier.expect(ready, 5 * 64 * 128)
                    _copy_tile(x_desc, [first, begin], ready, x.index(stage * 2))
                _copy_tile(w_desc, [row_a, begin], ready, w.index(stage * 2))
                _copy_tile(w_desc, [row_b, begin], ready, w.index(stage * 2 + 1))
                turn += 1


@_jit
def _add(acc, product, x_scale, w_scale):
    scale = gl.expand_dims(x_scale * w_scale, 1)
    return acc + product * scale


@_jit
def _sums(
    x_scale_ptr, w_scale_ptr, order_ptr, expert, first, last, tile_e, turn, sizes, tiles, barriers,
    HALF: gl.constexpr, SWIGLU: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The products of 64 rows with the two halves of a tile of the weight, fp32 [64, 128] each."""
    _, _, tokens, eighths, blocks, w_scale_stride, chosen, _ = sizes
    x, w = tiles
    full, empty = barriers
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    zeros = gl.zeros((64, 128), gl.float32, mma)
    weight_blocks = (eighths + 15) // 16
    block_a, block_b = _weight_blocks(tile_e, eighths, SWIGLU)
    scales = w_scale_ptr + expert.to(gl.int64) * weight_blocks * w_scale_stride
    scales_a = scales + block_a * w_scale_stride
    # Behind the last row of the weight nothing is stored.
    scales_b = scales + gl.minimum(block_b, weight_blocks - 1) * w_scale_stride
    row_scales = x_scale_ptr + _source(order_ptr, first + m, last, chosen, KIND)
    x_scale = gl.load(row_scales)
    scale_a = gl.load(scales_a)
    scale_b = gl.load(scales_b)
    acc_a = zeros
    acc_b = zeros
    for block in range(blocks):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        if KIND == "gather":
            # Before the loads below: a fence waits for what is under way.
            fence_async_shared()
        following = gl.minimum(block + 1, blocks - 1)
        next_x_scale = gl.load(row_scales + following.to(gl.int64) * tokens)
        next_a = gl.load(scales_a + following)
        next_b = gl.load(scales_b + following)
        rows = x.index(stage * 2 + HALF)
        weight = w.index(stage * 2).permute((1, 0))
        product = warpgroup_mma(rows, weight, zeros, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        acc_a = _add(acc_a, product, x_scale, scale_a)
        weight = w.index(stage * 2 + 1).permute((1, 0))
        product = warpgroup_mma(rows, weight, zeros, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc_b = _add(acc_b, product, x_scale, scale_b)
        x_scale = next_x_scale
        scale_a = next_a
        scale_b = next_b
        turn += 1
    return acc_a, acc_b


@_jit
def _multiply(
    pointers, sizes, tiles, barriers, room,
    HALF: gl.constexpr, SWIGLU: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: rows 64 * HALF and so on of each tile."""
    x_scale_ptr, w_scale_ptr, order_ptr, tiles_ptr, out_ptr, out_scale_ptr = pointers
    num_tiles, tiles_e, _, eighths, blocks, _, _, places = sizes
    full, empty = barriers
    turn = 0
    for index in range(gl.program_id(0), num_tiles * tiles_e, gl.num_programs(0)):
        expert, first, last, tile_e = _tile(index, tiles_ptr, sizes, KIND)
        if expert >= 0:
            first += HALF * 64
            if first < last:
                acc_a, acc_b = _sums(
                    x_scale_ptr, w_scale_ptr, order_ptr, expert, first, last, tile_e, turn, sizes,
                    tiles, barriers, HALF, SWIGLU, KIND,
                )  # fmt: skip
                own = room.index(HALF)
                if SWIGLU:
                    store_silu_product(
                        out_ptr, out_scale_ptr, acc_a, acc_b, own, first, last, tile_e, eighths,
                        places,
                    )  # fmt: skip
                else:
                    store_rows(
                        out_ptr, order_ptr, acc_a, acc_b, own, first, last, tile_e * 256, eighths,
                        KIND,
                    )  # fmt: skip
            else:
                # No row is left for this group: it gives back what was fetched.
                for block in range(turn, turn + blocks):
                    mbarrier.wait(full.index(block % STAGES), (block // STAGES) & 1)
                    mbarrier.arrive(empty.index(block % STAGES), count=1)
            turn += blocks


@_jit_of_any_size
def _products(
    x_ptr, x_desc, x_scale_ptr, w_desc, w_scale_ptr, order_ptr, tiles_ptr, out_ptr, out_scale_ptr,
    num_tiles, tiles_e, tokens, eighths, blocks, w_scale_stride, chosen, places,
    SWIGLU: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Products of `tokens` rows; eighths: an eighth of the rows of the (expert's) weight."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8, rank=2
    )
    out_type: gl.constexpr = out_ptr.dtype.element_ty
    of_room: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=out_type.primitive_bitwidth, rank=2
    )
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 64, 128], swizzled)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 128, 128], w_desc.layout)
    room = gl.allocate_shared_memory(out_type, [2, 64, 128], of_room)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every fetching thread says when its own copies are done, and one expects the engine's.
        mbarrier.init(full.index(stage), count=129 if KIND == "gather" else 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    sizes = (num_tiles, tiles_e, tokens, eighths, blocks, w_scale_stride, chosen, places)
    tiles = (x, w)
    barriers = (full, empty)
    pointers = (x_scale_ptr, w_scale_ptr, order_ptr, tiles_ptr, out_ptr, out_scale_ptr)
    sources = (x_ptr, x_desc, w_desc, order_ptr, tiles_ptr)
    UPPER: gl.constexpr = 0
    LOWER: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (pointers, sizes, tiles, barriers, room, UPPER, SWIGLU, KIND)),
            (_multiply, (pointers, sizes, tiles, barriers, room, LOWER, SWIGLU, KIND)),
            (_fetch, (sources, sizes, tiles, barriers, SWIGLU, KIND)),
        ],
        [4, 4],
        REGISTERS,
    )


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
        TensorDescriptor.from_tensor(x.values_TD, [64, 128], layout),
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
        KIND="one" if groups is None else "gather" if chosen else "back",
        num_warps=4,
    )
