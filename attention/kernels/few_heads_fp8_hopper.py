"""The kernel of `few_heads` for rows in fp8: they come through registers.

A tile is 16 keys for each warp. Its rows come into registers, the next tile's while this one is
multiplied, and become fp16, which holds every number of e4m3: from there they feed the first
product as they are and go to shared memory for the second. Scales are multiplied in fp32,

    S^T = sum_g scale_g K_g Q_g^T,    O_g^T += K_g^T (scale_g P)^T,    g: groups of 128 columns

so nothing but queries and weights is rounded to fp16.

The 16 bytes of a row that a thread loads at once are not the columns that the tensor cores take
from it. A product does not depend on the order of columns, so the queries are stored in that order.
"""

# The body of a Gluon kernel is no Python to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import constexpr

from .few_heads_hopper import add_values, load_queries, slots_of, weigh, write_sums
from .latent_hopper_rows import ask, barrier

# To a type checker kernels and what they are written in are anything, as in `launch`.
gl: Any = language
_jit: Any = gluon.jit

# Of the weights, a power of two: latents up to 28,000 do not overflow fp16, and weights above 0.1
# keep all bits over groups whose largest element is 0.3 or more.
RAISE = gl.constexpr(1024.0)


@_jit
def _as_fp16(words):
    """Four numbers of e4m3 in each word [n, w]: fp16 [n, 4 w]."""
    a, b, c, d = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high; .reg .b32 x, y;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 x, low;
        cvt.rn.f16x2.e4m3x2 y, high;
        mov.b32 {$0, $1}, x;
        mov.b32 {$2, $3}, y;
        }""",
        "=h,=h,=h,=h,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=1,
    )  # fmt: skip
    fours = gl.join(gl.join(a, c), gl.join(b, d))
    return fours.reshape([words.shape[0], 4 * words.shape[1]])


@_jit
def _halves(words, dtype: constexpr):
    """Two numbers of 16 bits in each word [n, w]: [n, 2 w]."""
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16),
        is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.join(a.to(dtype, bitcast=True), b.to(dtype, bitcast=True))
    return pairs.reshape([words.shape[0], 2 * words.shape[1]])


@_jit
def _reordered(x, S: constexpr):
    """Columns [c, s, i, j] of sizes 4, S, 2, 2 in the order s, i, c, j: a thread's 4 S columns in a
    row become the four that it holds of each of S steps of 16 columns."""
    n: constexpr = x.shape[0]
    width: constexpr = x.shape[1]
    x = x.reshape([n, width // (16 * S), 4, S, 2, 2]).permute((0, 1, 3, 4, 2, 5))
    return x.reshape([n, width])


@_jit
def _operand(x, S: constexpr, mma: constexpr):
    left: constexpr = gl.DotOperandLayout(0, mma, 2)
    return gl.convert_layout(_reordered(x, S), left, assert_trivial=True)


@_jit
def _place(slot, stride, layout: constexpr):
    """In units of 16 bytes [n, 1], and whether there is any."""
    slot = gl.convert_layout(slot, gl.SliceLayout(1, layout), assert_trivial=True)
    return gl.expand_dims(slot * stride, 1), gl.expand_dims(slot >= 0, 1)


@_jit
def _load_tile(pointers, slot, stride, of_words: constexpr, of_scales: constexpr):
    """Of the rows in `slot`: four groups of 32 words of latents, as many of the rotary part, and
    the scales; zeros where a slot is below 0."""
    latent_ptr, rope_ptr, scale_ptr = pointers
    place, counts = _place(slot, stride, of_words)
    column = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, of_words)), 0)
    words = ()
    for g in gl.static_range(4):
        at = latent_ptr + place * 4 + (column + g * 32)
        words = words + (gl.load(at, mask=counts, other=0),)
    rope = gl.load(rope_ptr + place * 4 + column, mask=counts, other=0)
    place, counts = _place(slot, stride, of_scales)
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, of_scales)), 0)
    return words, rope, gl.load(scale_ptr + place * 4 + group, mask=counts, other=0.0)


@_jit
def _split_scales(scales, key: constexpr):
    """Four columns [keys, 1] of scales [keys, 4]."""
    even, odd = scales.reshape([scales.shape[0], 2, 2]).split()
    scale0, scale2 = even.split()
    scale1, scale3 = odd.split()
    return (_column(scale0, key), _column(scale1, key), _column(scale2, key), _column(scale3, key))


@_jit
def _column(scale, key: constexpr):
    return gl.expand_dims(gl.convert_layout(scale, key, assert_trivial=True), 1)


@_jit
def attend_fp8(
    q_ptr, latent_ptr, rope_ptr, scale_ptr, source_ptr, bounds_ptr, parts_ptr, out_ptr, lse_ptr,
    rows, heads, columns, parts, part_length, stride, stride_source,
    H: constexpr, PAGE: constexpr, ASK: constexpr = False,
):  # fmt: skip
    """A program takes all rows of a query (request) and a part of its keys; PAGE 0: by slots.

    ASK: rows are asked for a tile before they are loaded, so that they come from the L2 cache.
    """
    WARPS: constexpr = gl.num_warps()
    KEYS: constexpr = 16 * WARPS
    part = gl.program_id(0)
    out_ptr += part.to(gl.int64) * rows * 512
    lse_ptr += part * rows
    if PAGE == 0:
        own = (part // parts).to(gl.int64)
        first = part % parts * part_length
        end = gl.minimum(columns, first + part_length)
        last = gl.minimum(gl.load(bounds_ptr + own), end).to(gl.int32)
        bound = columns
        # An empty part of several is not read when they are joined.
        write = (parts == 1) | (first < last)
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

    # A thread has two rows, as the tensor cores want them, of which it loads 16 bytes at a time.
    of_warps: constexpr = [[16, 0], [32, 0], [64, 0]] if WARPS == 8 else [[16, 0], [32, 0]]
    of_words: constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], of_warps, [], [KEYS, 32],
    )  # fmt: skip
    of_scales: constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], of_warps, [], [KEYS, 4],
    )  # fmt: skip
    mma: constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, H, 16]
    )
    key: constexpr = gl.SliceLayout(1, mma)
    head: constexpr = gl.SliceLayout(0, mma)
    wide: constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * H, element_bitwidth=16, rank=2)
    plain: constexpr = q_ptr.dtype.element_ty
    q_rope = gl.allocate_shared_memory(plain, [H, 64], wide)
    # Between stores to parts of one allocation the compiler puts barriers.
    q, latent, weights_of = (), (), ()
    for _group in gl.static_range(4):
        q = q + (gl.allocate_shared_memory(gl.float16, [1, H, 128], wide),)
        latent = latent + (gl.allocate_shared_memory(gl.float16, [KEYS, 128], wide),)
        weights_of = weights_of + (gl.allocate_shared_memory(gl.float16, [KEYS, H], narrow),)

    of_rope: constexpr = rope_ptr.dtype.element_ty
    word: constexpr = gl.pointer_type(gl.int32)
    pointers = (latent_ptr.cast(word, bitcast=True), rope_ptr.cast(word, bitcast=True), scale_ptr)
    slot = slots_of(source, first, last, PAGE, key, KEYS)
    words, rope, scales = _load_tile(pointers, slot, stride, of_words, of_scales)
    following = slots_of(source, first + KEYS, last, PAGE, key, KEYS)
    if ASK:
        ask(latent_ptr, following, stride, WARPS)
    groups, rotary = load_queries(q_ptr, rows, H, WARPS)
    q_rope.store(_reordered(rotary, 2))
    for g in gl.static_range(4):
        q[g].index(0).store(_reordered(groups[g].to(gl.float16), 4))
    fence_async_shared()
    barrier()

    zeros = gl.zeros((KEYS, H), gl.float32, mma)
    acc0 = gl.zeros((128, H), gl.float32, mma)
    acc1, acc2, acc3 = acc0, acc0, acc0
    largest = gl.full((H,), float("-inf"), gl.float32, head)
    totals = zeros
    # Behind the last key of the part, or behind the key of the row's own token.
    visible = gl.minimum(last, bound + gl.arange(0, H, layout=head) // heads)
    visible = gl.expand_dims(visible, 0)
    for begin in range(first, last, KEYS):
        # 0, which the compiler cannot know: it would keep where the queries lie in registers.
        nought = begin >> 30
        if PAGE == 0:
            seen = gl.expand_dims(slot >= 0, 1)
        else:
            seen = gl.expand_dims(begin + gl.arange(0, KEYS, layout=key), 1) < visible
        slot = following
        following = slots_of(source, begin + 2 * KEYS, last, PAGE, key, KEYS)
        scale = _split_scales(scales, key)
        keys = _operand(_halves(rope, of_rope).to(plain), 2, mma)
        product = warpgroup_mma(keys, q_rope.permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Operands in registers stay what they are until the product is done.
        scores, keys = warpgroup_mma_wait(0, deps=(product, keys))
        for g in gl.static_range(4):
            values = _as_fp16(words[g])
            keys = _operand(values, 4, mma)
            product = warpgroup_mma(
                keys, q[g].index(nought).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            latent[g].store(values)
            product, keys = warpgroup_mma_wait(0, deps=(product, keys))
            scores += product * scale[g]
        weights, shrink, largest, totals = weigh(scores, seen, largest, totals)
        for g in gl.static_range(4):
            weights_of[g].store((weights * (scale[g] * RAISE)).to(gl.float16))
        fence_async_shared()
        # Behind the fence, which would wait for these loads.
        words, rope, scales = _load_tile(pointers, slot, stride, of_words, of_scales)
        barrier()
        if ASK:
            ask(latent_ptr, following, stride, WARPS)
        acc0 = add_values(latent[0], weights_of[0], acc0, shrink)
        acc1 = add_values(latent[1], weights_of[1], acc1, shrink)
        acc2 = add_values(latent[2], weights_of[2], acc2, shrink)
        acc3 = add_values(latent[3], weights_of[3], acc3, shrink)
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2, acc3))
        # Every warp is done with the tile.
        barrier()
    acc = (acc0, acc1, acc2, acc3)
    write_sums(out_ptr, lse_ptr, acc, largest, totals, RAISE, rows, write)
