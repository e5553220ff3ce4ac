"""The kernel of `few_heads` for rows of 16-bit elements, and what it shares with the one for fp8.

One warp group multiplies while another one copies the next tile of 64 rows in the background. The
values of the second product are the transposed view of the tile that the first one reads as keys.
Shared memory holds two tiles.
"""

# The body of a Gluon kernel is no Python to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import constexpr

from .latent_hopper_rows import barrier

# To a type checker kernels and what they are written in are anything, as in `launch`.
gl: Any = language
_jit: Any = gluon.jit

STAGES = gl.constexpr(2)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@_jit
def slots_of(
    source, begin, last, PAGE: constexpr, layout: constexpr, KEYS: constexpr = 64
):  # fmt: skip
    """Slots of the KEYS keys from `begin` on; below 0 for those that do not count."""
    source_ptr, _, end = source
    n = begin + gl.arange(0, KEYS, layout=layout)
    if PAGE == 0:
        # Does not wait for the count.
        slot = gl.load(source_ptr + n, mask=n < end, other=-1).to(gl.int64)
    else:
        page = gl.load(source_ptr + n // PAGE, mask=n < last, other=0).to(gl.int64)
        slot = page * PAGE + n % PAGE
    return gl.where(n < last, slot, -1)


@_jit
def _last(source, PAGE: constexpr):
    """One behind the last key of the part."""
    _, last, end = source
    if PAGE == 0:
        last = gl.minimum(gl.load(last), end).to(gl.int32)
    return last


@_jit
def _fetch(
    latent_ptr, rope_ptr, source, first, stride, latent, rope, full, empty, PAGE: constexpr,
):  # fmt: skip
    """Rows of 16-bit elements, copied in the background."""
    of_rows: constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    of_rope: constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row: constexpr = gl.SliceLayout(1, of_rows)
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows)), 0)
    rope_column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, of_rope)), 0)
    last = _last(source, PAGE)
    slot = slots_of(source, first, last, PAGE, row)
    for i in range((last - first + 63) // 64):
        stage = i % STAGES
        following = slots_of(source, first + i * 64 + 64, last, PAGE, row)
        counts = gl.expand_dims(slot >= 0, 1)
        place = gl.expand_dims(slot * stride, 1)
        rope_slot = gl.convert_layout(slot, gl.SliceLayout(1, of_rope))
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        for g in gl.static_range(4):
            async_copy.async_copy_global_to_shared(
                latent.index(stage * 4 + g), latent_ptr + place * 8 + (column + g * 128), counts
            )
        async_copy.async_copy_global_to_shared(
            rope.index(stage),
            rope_ptr + gl.expand_dims(rope_slot * stride, 1) * 8 + rope_column,
            gl.expand_dims(rope_slot >= 0, 1),
        )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        slot = following


@_jit
def load_queries(q_ptr, rows, H: constexpr, WARPS: constexpr):
    """Four groups of 128 latent columns and the rotary part; zeros for rows there are not."""
    of_rows: constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    h = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, of_rows)), 1)
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows)), 0)
    rope_column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, of_rows)), 0)
    q_ptr += h * 576
    groups = ()
    for g in gl.static_range(4):
        groups = groups + (gl.load(q_ptr + (column + g * 128), mask=h < rows, other=0.0),)
    return groups, gl.load(q_ptr + (rope_column + 512), mask=h < rows, other=0.0)


@_jit
def weigh(scores, seen, largest, totals):
    """`online_softmax.weigh` for keys as rows; totals are summed over the keys at the end.

    Returns the weights, what earlier sums [.., H] shrink by, and both states anew.
    """
    scores = gl.where(seen, scores * LOG2E, float("-inf"))
    reached = gl.maximum(largest, gl.max(scores, 0))
    # Nothing seen so far: any finite number will do instead of -inf - -inf.
    base = gl.where(reached == float("-inf"), 0.0, reached)
    shrink = gl.expand_dims(gl.exp2(largest - base), 0)
    weights = gl.exp2(scores - gl.expand_dims(base, 0))
    return weights, shrink, reached, totals * shrink + weights


@_jit
def add_values(values, weights, acc, shrink):
    """acc * shrink + values^T @ weights, under way."""
    return warpgroup_mma(values.permute((1, 0)), weights, acc * shrink, is_async=True)


@_jit
def write_sums(out_ptr, lse_ptr, acc, largest, totals, raised, rows, write):
    """acc: four groups of 128 columns [128, H], whose weights were multiplied by `raised`."""
    layout: constexpr = totals.type.layout
    H: constexpr = totals.shape[1]
    total = gl.sum(totals, 0)
    some = total > 0.0
    divisor = gl.where(some, total, 1.0)
    lse = gl.where(some, (largest + gl.log2(divisor)) * LN2, float("-inf"))
    h = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    gl.store(lse_ptr + h, lse, mask=h < rows)
    factor = gl.expand_dims(1.0 / (divisor * raised), 0)
    h = gl.expand_dims(h, 0)
    out_ptr += h * 512 + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, layout)), 1)
    out_type: constexpr = out_ptr.dtype.element_ty
    for g in gl.static_range(4):
        gl.store(out_ptr + g * 128, (acc[g] * factor).to(out_type), mask=(h < rows) & write)


@_jit
def _multiply(
    q_ptr, out_ptr, lse_ptr, source, rows, heads, first, bound, write, q, q_rope, latent, rope,
    weights_of, full, empty, H: constexpr, PAGE: constexpr,
):  # fmt: skip
    mma: constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, H, 16]
    )
    key: constexpr = gl.SliceLayout(1, mma)
    head: constexpr = gl.SliceLayout(0, mma)
    last = _last(source, PAGE)
    if PAGE == 0:
        slot = slots_of(source, first, last, PAGE, key)
    groups, rotary = load_queries(q_ptr, rows, H, 4)
    q_rope.index(0).store(rotary)
    for g in gl.static_range(4):
        q.index(g).store(groups[g])
    fence_async_shared()
    barrier()
    zeros = gl.zeros((64, H), gl.float32, mma)
    # Groups of 128 columns.
    acc0 = gl.zeros((128, H), gl.float32, mma)
    acc1, acc2, acc3 = acc0, acc0, acc0
    largest = gl.full((H,), float("-inf"), gl.float32, head)
    totals = zeros
    # Behind the last key of the part, or behind the key of the row's own token.
    visible = gl.minimum(last, bound + gl.arange(0, H, layout=head) // heads)
    visible = gl.expand_dims(visible, 0)
    for i in range((last - first + 63) // 64):
        stage = i % STAGES
        # 0, which the compiler cannot know: it would keep where the queries lie in registers.
        nought = i >> 30
        at = stage * 4
        begin = first + i * 64
        if PAGE == 0:
            seen = gl.expand_dims(slot >= 0, 1)
            slot = slots_of(source, begin + 64, last, PAGE, key)
        else:
            seen = gl.expand_dims(begin + gl.arange(0, 64, layout=key), 1) < visible
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        fence_async_shared()
        scores = warpgroup_mma(
            rope.index(stage), q_rope.index(nought).permute((1, 0)), zeros,
            use_acc=False, is_async=True,
        )  # fmt: skip
        for g in gl.static_range(4):
            scores = warpgroup_mma(
                latent.index(at + g), q.index(nought + g).permute((1, 0)), scores, is_async=True
            )
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weights, shrink, largest, totals = weigh(scores, seen, largest, totals)
        weights_of.store(weights.to(latent.dtype))
        fence_async_shared()
        barrier()
        acc0 = add_values(latent.index(at), weights_of, acc0, shrink)
        acc1 = add_values(latent.index(at + 1), weights_of, acc1, shrink)
        acc2 = add_values(latent.index(at + 2), weights_of, acc2, shrink)
        acc3 = add_values(latent.index(at + 3), weights_of, acc3, shrink)
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2, acc3))
        # Every warp is done with the tile.
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    if PAGE == 0:
        # An empty part of several is not read when they are joined.
        write |= first < last
    acc = (acc0, acc1, acc2, acc3)
    write_sums(out_ptr, lse_ptr, acc, largest, totals, 1.0, rows, write)


@_jit
def attend(
    q_ptr, latent_ptr, rope_ptr, scale_ptr, source_ptr, bounds_ptr, parts_ptr, out_ptr, lse_ptr,
    rows, heads, columns, parts, part_length, stride, stride_source,
    H: constexpr, PAGE: constexpr,
):  # fmt: skip
    """A program takes all rows of a query (request) and a part of its keys; PAGE 0: by slots."""
    part = gl.program_id(0)
    out_ptr += part.to(gl.int64) * rows * 512
    lse_ptr += part * rows
    if PAGE == 0:
        own = (part // parts).to(gl.int64)
        first = part % parts * part_length
        # Who needs the count loads it.
        last = bounds_ptr + own
        end = gl.minimum(columns, first + part_length)
        bound = columns
        write = parts == 1
    else:
        own = gl.load(parts_ptr + part * 3).to(gl.int64)
        first = gl.load(parts_ptr + part * 3 + 1)
        last = gl.load(parts_ptr + part * 3 + 2)
        end = last
        write = own >= 0
        rows = gl.where(write, rows, 0)
        own = gl.maximum(own, 0)
        bound = gl.load(bounds_ptr + own) - rows // heads + 1
    source = (source_ptr + own * stride_source, last, end)
    q_ptr += own * rows * 576

    wide: constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * H, element_bitwidth=16, rank=2)
    dtype: constexpr = q_ptr.dtype.element_ty
    q = gl.allocate_shared_memory(dtype, [4, H, 128], wide)
    q_rope = gl.allocate_shared_memory(dtype, [1, H, 64], wide)
    latent = gl.allocate_shared_memory(dtype, [STAGES * 4, 64, 128], wide)
    rope = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], wide)
    weights = gl.allocate_shared_memory(dtype, [64, H], narrow)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every fetching thread says when its own copies are done.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                q_ptr, out_ptr, lse_ptr, source, rows, heads, first, bound, write, q, q_rope,
                latent, rope, weights, full, empty, H, PAGE,
            )),
            (_fetch, (
                latent_ptr, rope_ptr, source, first, stride, latent, rope, full, empty, PAGE,
            )),
        ],
        [4],
        [88],
    )  # fmt: skip
