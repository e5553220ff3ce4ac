"""The fetching warp group of `latent_hopper`: rows by slot into shared memory, told by barriers.

Rows of 16 bits are copied in the background, four halves (64 keys times 256 columns) to a pair of
tiles, each as soon as it was given back. Rows in fp8 are multiplied as fp16, as in `latent_rows`;
they come through registers, in groups of the 128 columns that share a scale, AHEAD groups under
way while one is converted. Nothing but the shared barriers orders those stores: a fence between
them and the tensor cores would wait for the loads under way as well, so it is left to the readers,
who have one behind each barrier.

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

# Groups of fp8 columns under way: registers for more are not there.
AHEAD = gl.constexpr(2)
# Triton 3.7 renamed it.
barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier


@_jit
def slots_of(source_ptr, begin, last, PAGE: constexpr, layout: constexpr):
    """Slots of the 64 keys from `begin` on; below 0 for those that do not count."""
    n = begin + gl.arange(0, 64, layout=layout)
    if PAGE == 0:
        slot = gl.load(source_ptr + n, mask=n < last, other=-1).to(gl.int64)
    else:
        page = gl.load(source_ptr + n // PAGE, mask=n < last, other=0).to(gl.int64)
        slot = gl.where(n < last, page * PAGE + n % PAGE, -1)
    return slot


@_jit
def _fetch_queries(
    q_ptr, q_rope_ptr, rows_left, stride_q, stride_q_rope, tiles, barriers, FP8: constexpr
):
    """Of queries for fp8 rows the rotary part: the rest is converted by who multiplies it."""
    q, q_rope, _, _ = tiles
    of_rows: constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
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
    of_rows: constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
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
            place = gl.expand_dims(slot * stride, 1)
            for half in gl.static_range(2):
                at = 2 * tile + half
                mbarrier.wait(empty.index(at), (i & 1) ^ 1)
                # Who gives back the second half of tile 0 or the first one of tile 1 is the last to
                # read the tile's weights, which lie in the rotary part.
                if half != tile:
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


@_jit
def _load_group(words_ptr, scale_ptr, slot, stride, group):
    """128 columns of fp8 rows as 32 words, and their scales in both halves of a word."""
    layout: constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, layout)), 0)
    place = slot * stride * 4
    words = gl.load(
        words_ptr + gl.expand_dims(place, 1) + (column + 32 * group),
        mask=gl.expand_dims(slot >= 0, 1),
        other=0,
    )
    scale = gl.load(scale_ptr + place + group, mask=slot >= 0, other=0.0)
    return words, scale


@_jit
def _store_group(room, words, scale):
    """Into 128 columns of fp16 in shared memory, which `room` sees as 64 words."""
    scale = (scale * RAISE).to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    scale = gl.expand_dims(scale * 0x10001, 1)
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
    of_rope: constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    of_words: constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    row: constexpr = gl.SliceLayout(1, of_words)
    rope_column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, of_rope)), 0)
    words_swizzled: constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=32, rank=2
    )
    latent_words = latent._reinterpret(gl.int32, [4, 64, 128], words_swizzled)
    words_ptr = latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    slot = slots_of(source_ptr, first, last, PAGE, row)
    word, scale = _load_group(words_ptr, scale_ptr, slot, stride, 0)
    words = (word,)
    scales = (scale,)
    for group in gl.static_range(1, AHEAD):
        word, scale = _load_group(words_ptr, scale_ptr, slot, stride, group)
        words = words + (word,)
        scales = scales + (scale,)
    following = slots_of(source_ptr, first + 64, last, PAGE, row)
    for i in range(pairs):
        for tile in gl.static_range(2):
            begin = first + i * 128 + tile * 64
            later = slots_of(source_ptr, begin + 128, last, PAGE, row)
            rope_slot = gl.convert_layout(slot, gl.SliceLayout(1, of_rope))
            for group in gl.static_range(4):
                at = 2 * tile + group // 2
                if group % 2 == 0:
                    mbarrier.wait(empty.index(at), (i & 1) ^ 1)
                    # As in `_fetch`.
                    if group // 2 != tile:
                        async_copy.async_copy_global_to_shared(
                            rope.index(tile),
                            rope_ptr + gl.expand_dims(rope_slot * stride, 1) * 8 + rope_column,
                            mask=gl.expand_dims(rope_slot >= 0, 1),
                        )
                    async_copy.mbarrier_arrive(full.index(at), increment_count=False)
                room = latent_words.index(at).slice(group % 2 * 64, 64, dim=1)
                _store_group(room, words[0], scales[0])
                if group % 2 == 1:
                    barrier()
                    mbarrier.arrive(full.index(at), count=1)
                if group + AHEAD < 4:
                    word, scale = _load_group(words_ptr, scale_ptr, slot, stride, group + AHEAD)
                else:
                    word, scale = _load_group(
                        words_ptr, scale_ptr, following, stride, group + AHEAD - 4
                    )
                words = words[1:] + (word,)
                scales = scales[1:] + (scale,)
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
