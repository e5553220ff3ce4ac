"""The fetching warp group of `latent_hopper`: rows by slot into shared memory, told by barriers.

Rows of 16 bits are copied in the background, four halves (64 keys times 256 columns) to a pair of
tiles, each as soon as it was given back. Rows in fp8 are multiplied as fp16, as in `latent_rows`;
they come through registers, in groups of the 128 columns that share a scale, AHEAD groups under
way while one is converted. Registers for more are not there, so rows are asked into the L2 cache a
tile earlier, and eight warps convert, not four. Nothing but the shared barriers orders those
stores: a fence between them and the tensor cores would wait for the loads under way as well, so it
is left to the readers, who have one behind each barrier.

A slot below 0 is no read: zeros take its place.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language import constexpr

from .latent_rows import RAISE

# To a type checker kernels and what they are written in are anything, as in `launch`.
gl: Any = language
_jit: Any = gluon.jit

# Warps that fetch rows of 16 bits and rows in fp8.
COPYING, CONVERTING = gl.constexpr(4), gl.constexpr(8)
# Groups of fp8 columns under way.
AHEAD = gl.constexpr(2)
# Triton 3.7 renamed it.
barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def group_of(tile: int, k: int) -> int:
    """Which group of 128 columns of a tile comes k-th: the half first that is given back first."""
    return (k + 2 * tile) % 4


@_jit
def slots_of(source_ptr, begin, last, PAGE: constexpr, layout: constexpr):
    """Slots of the 64 keys from `begin` on; below 0 for those that do not count."""
    n = begin + gl.arange(0, 64, layout=layout)
    if PAGE == 0:
        slot = gl.load(source_ptr + n, mask=n < last, other=-1).to(gl.int32)
    else:
        page = gl.load(source_ptr + n // PAGE, mask=n < last, other=0).to(gl.int32)
        slot = gl.where(n < last, page * PAGE + n % PAGE, -1)
    return slot


@_jit
def _fetch_queries(
    q_ptr, q_rope_ptr, rows_left, stride_q, stride_q_rope, tiles, barriers, FP8: constexpr
):
    """Of queries for fp8 rows the rotary part: the rest is converted by who multiplies it."""
    q, q_rope, _, _ = tiles
    warps: constexpr = CONVERTING if FP8 else COPYING
    of_rows: constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    m = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows)).to(gl.int64), 1)
    column = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, of_rows)), 0)
    rope_column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, of_rows)), 0)
    if not FP8:
        for half in gl.static_range(2):
            q_half = q_ptr + m * stride_q + (column + half * 256)
            async_copy.async_copy_global_to_shared(q.index(half), q_half, mask=m < rows_left)
    async_copy.async_copy_global_to_shared(
        q_rope.index(0), q_rope_ptr + m * stride_q_rope + rope_column, mask=m < rows_left
    )
    async_copy.mbarrier_arrive(barriers[3], increment_count=False)


@_jit
def _fetch(
    latent_ptr, rope_ptr, source_ptr, first, last, pairs, stride, tiles, barriers,
    PAGE: constexpr,
):  # fmt: skip
    """Copy the four halves of each pair of tiles, each as soon as it was given back."""
    _, _, latent, rope = tiles
    full, empty, _, _ = barriers
    of_rows: constexpr = gl.BlockedLayout([1, 8], [4, 8], [COPYING, 1], [1, 0])
    row: constexpr = gl.SliceLayout(1, of_rows)
    column = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, of_rows)), 0)
    rope_column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, of_rows)), 0)
    slot = slots_of(source_ptr, first, last, PAGE, row)
    for i in range(pairs):
        for tile in gl.static_range(2):
            # The next tile's slots are under way while this one's rows are.
            begin = first + i * 128 + tile * 64
            following = slots_of(source_ptr, begin + 64, last, PAGE, row)
            counts = gl.expand_dims(slot >= 0, 1)
            place = gl.expand_dims(slot.to(gl.int64) * stride, 1)
            for k in gl.static_range(2):
                half = group_of(tile, 2 * k) // 2
                at = 2 * tile + half
                mbarrier.wait(empty.index(at), (i & 1) ^ 1)
                # Who gives back the later half is the last to read the tile's weights, which lie in
                # the rotary part.
                if k == 1:
                    async_copy.async_copy_global_to_shared(
                        rope.index(tile), rope_ptr + place * 8 + rope_column, mask=counts
                    )
                async_copy.async_copy_global_to_shared(
                    latent.index(at), latent_ptr + place * 8 + (column + half * 256), mask=counts
                )
                async_copy.mbarrier_arrive(full.index(at), increment_count=False)
            slot = following


# Four e4m3 in a word to twice two fp16, times the scale in both halves of another word.
_CONVERT = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $3;
}""")


# Asks a line into the L2 cache, where the second word is not 0.
_ASK = gl.constexpr("""{
.reg .pred wanted;
setp.ne.s32 wanted, $2, 0;
@wanted prefetch.global.L2 [$1];
mov.b32 $0, 0;
}""")


@_jit
def ask(rows_ptr, slot, stride, WARPS: constexpr):
    """The lines of fp8 rows on their way into the L2 cache; `stride` in units of 16 bytes."""
    layout: constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    slot = gl.expand_dims(gl.convert_layout(slot, gl.SliceLayout(1, layout)), 1)
    byte = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, layout)) * 128, 0)
    address = rows_ptr.to(gl.int64, bitcast=True) + slot.to(gl.int64) * stride * 16 + byte
    wanted = ((slot >= 0) & (byte < 656)).to(gl.int32)
    gl.inline_asm_elementwise(_ASK, "=r,l,r", [address, wanted], gl.int32, is_pure=False, pack=1)


@_jit
def _load_group(words_ptr, slot, stride, group):
    """128 columns of fp8 rows as 32 words."""
    layout: constexpr = gl.BlockedLayout([1, 4], [8, 4], [CONVERTING, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, layout)), 0)
    slot = gl.expand_dims(slot, 1)
    place = slot.to(gl.int64) * stride * 4
    return gl.load(words_ptr + place + (column + 32 * group), mask=slot >= 0, other=0)


@_jit
def _load_ahead(words_ptr, slot, following, stride, tile: constexpr, k: constexpr):
    """The k-th group of the rows in `slot`, or behind their four one of those in `following`."""
    if k < 4:
        return _load_group(words_ptr, slot, stride, group_of(tile, k))
    else:
        return _load_group(words_ptr, following, stride, group_of(1 - tile, k - 4))


@_jit
def _load_scales(scale_ptr, slot, stride):
    """The scales of the four groups, 16 bytes a row."""
    layout: constexpr = gl.BlockedLayout([1, 4], [8, 4], [CONVERTING, 1], [1, 0])
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, layout)), 0)
    slot = gl.expand_dims(slot, 1)
    place = slot.to(gl.int64) * stride * 4
    return gl.load(scale_ptr + place + group, mask=slot >= 0, other=0.0)


@_jit
def _split(scales):
    """The bits of the four groups' scales in fp16, raised, each [64]."""
    row: constexpr = gl.SliceLayout(1, scales.type.layout)
    bits = (scales * RAISE).to(gl.float16).to(gl.int16, bitcast=True)
    even, odd = gl.split(gl.reshape(bits, (64, 2, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, row), gl.convert_layout(second, row),
        gl.convert_layout(third, row), gl.convert_layout(fourth, row),
    )  # fmt: skip


@_jit
def _store_group(room, words, scale):
    """Into 128 columns of fp16 in shared memory, which `room` sees as 64 words."""
    scale = gl.expand_dims((scale.to(gl.int32) & 0xFFFF) * 0x10001, 1)
    low, high = gl.inline_asm_elementwise(
        _CONVERT, "=r,=r,r,r", [words, scale], (gl.int32, gl.int32), is_pure=True, pack=1
    )
    room.store(gl.reshape(gl.join(low, high), (64, 64)))


@_jit
def _fetch_fp8(
    latent_ptr, rope_ptr, scale_ptr, source_ptr, first, last, pairs, stride, tiles, barriers,
    PAGE: constexpr,
):  # fmt: skip
    """As `_fetch`: groups of 128 columns come through registers, AHEAD of them under way."""
    _, _, latent, rope = tiles
    full, empty, _, _ = barriers
    of_rope: constexpr = gl.BlockedLayout([1, 8], [8, 4], [CONVERTING, 1], [1, 0])
    of_words: constexpr = gl.BlockedLayout([1, 4], [8, 4], [CONVERTING, 1], [1, 0])
    row: constexpr = gl.SliceLayout(1, of_words)
    rope_column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, of_rope)), 0)
    words_swizzled: constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=32, rank=2
    )
    latent_words = latent._reinterpret(gl.int32, [4, 64, 128], words_swizzled)
    words_ptr = latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    slot = slots_of(source_ptr, first, last, PAGE, row)
    words = (_load_group(words_ptr, slot, stride, 0),)
    for group in gl.static_range(1, AHEAD):
        words = words + (_load_group(words_ptr, slot, stride, group),)
    following = slots_of(source_ptr, first + 64, last, PAGE, row)
    ask(latent_ptr, slot, stride, CONVERTING)
    ask(latent_ptr, following, stride, CONVERTING)
    raw_scales = _load_scales(scale_ptr, slot, stride)
    for i in range(pairs):
        for tile in gl.static_range(2):
            begin = first + i * 128 + tile * 64
            scales = _split(raw_scales)
            later = slots_of(source_ptr, begin + 128, last, PAGE, row)
            rope_slot = gl.convert_layout(slot, gl.SliceLayout(1, of_rope))
            rope_place = gl.expand_dims(rope_slot.to(gl.int64) * stride, 1) * 8
            for k in gl.static_range(4):
                at = 2 * tile + group_of(tile, k) // 2
                if k == 2:
                    raw_scales = _load_scales(scale_ptr, following, stride)
                if k % 2 == 0:
                    mbarrier.wait(empty.index(at), (i & 1) ^ 1)
                    # As in `_fetch`.
                    if k == 2:
                        async_copy.async_copy_global_to_shared(
                            rope.index(tile), rope_ptr + rope_place + rope_column,
                            mask=gl.expand_dims(rope_slot >= 0, 1),
                        )  # fmt: skip
                    async_copy.mbarrier_arrive(full.index(at), increment_count=False)
                room = latent_words.index(at).slice(k % 2 * 64, 64, dim=1)
                _store_group(room, words[0], scales[group_of(tile, k)])
                if k % 2 == 1:
                    barrier()
                    mbarrier.arrive(full.index(at), count=1)
                if k == 1:
                    ask(latent_ptr, later, stride, CONVERTING)
                word = _load_ahead(words_ptr, slot, following, stride, tile, k + AHEAD)
                words = words[1:] + (word,)
            slot = following
            following = later


@_jit
def serve(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, scale_ptr, source_ptr, rows_left, first, last, pairs,
    stride_q, stride_q_rope, stride, tiles, barriers, PAGE: constexpr, FP8: constexpr,
):  # fmt: skip
    """The fetching warp group: the queries once, then keys first..last - 1 in pairs of tiles."""
    _fetch_queries(q_ptr, q_rope_ptr, rows_left, stride_q, stride_q_rope, tiles, barriers, FP8)
    if FP8:
        _fetch_fp8(
            latent_ptr, rope_ptr, scale_ptr, source_ptr, first, last, pairs, stride, tiles,
            barriers, PAGE,
        )  # fmt: skip
    else:
        _fetch(latent_ptr, rope_ptr, source_ptr, first, last, pairs, stride, tiles, barriers, PAGE)
