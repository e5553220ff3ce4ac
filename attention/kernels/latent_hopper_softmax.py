"""The softmax of `latent_hopper`: which keys of a tile count, and what its weights refer to.

Two things that are nearly always so are asked before the work is done that they spare: all keys of
a tile count, and no row's largest score grew by so much that its sums had to be scaled. Of 4096
queries over 32768 keys the second spared 3 to 4 % of the kernel's time; leaving all masks out, 6 %
(H200).
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.language import constexpr

from .latent_hopper_rows import slots_of

# To a type checker kernels and what they are written in are anything, as in `launch`.
gl: Any = language
_jit: Any = gluon.jit

LOG2E = gl.constexpr(1.4426950408889634)
# By how many powers of two a score may exceed what its row's weights refer to: sums of weights of
# up to 256 are as exact, and seldom is a sum to be scaled.
_SLACK = gl.constexpr(8.0)


@_jit
def all_count(source_ptr, begin, last, visible_first, PAGE: constexpr):
    """Whether all of the 64 keys from `begin` on count for all rows; the first row sees least."""
    if PAGE == 0:
        # Every warp reads them all, two a thread: a branch needs no other warp then.
        of_slots: constexpr = gl.BlockedLayout([2], [32], [4], [0])
        whole = gl.min(slots_of(source_ptr, begin, last, 0, of_slots), 0) >= 0
    else:
        whole = begin + 64 <= visible_first
    return whole


@_jit
def hide(scores, source_ptr, begin, last, visible, PAGE: constexpr):
    """-inf for keys that do not count: without a slot, or behind those `visible` to their row."""
    key: constexpr = gl.SliceLayout(0, scores.type.layout)
    if PAGE == 0:
        seen = gl.expand_dims(slots_of(source_ptr, begin, last, 0, key) >= 0, 0)
    else:
        n = begin + gl.arange(0, 64, layout=key)
        seen = gl.expand_dims(n, 0) < gl.expand_dims(visible, 1)
    return gl.where(seen, scores, float("-inf"))


@_jit
def base_of(largest):
    """Nothing seen so far: any finite number will do instead of -inf - -inf."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@_jit
def reference(largest, reached):
    """What weights refer to: a score that none exceeds by more than _SLACK."""
    return gl.where(reached > largest + _SLACK, reached, largest)


@_jit
def scale(acc, factor):
    """Each row of [64, C] sums times its factor."""
    layout: constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.expand_dims(gl.convert_layout(factor, layout), 1)


def _scale_unless_one(count: int) -> str:
    """PTX: `count` sums of a thread times their factors, left out where all of a warp are 1.

    A thread's sums belong to two rows, two of one and two of the other in turns.
    """
    of_both = (2 * count, 2 * count + 2)
    lines = [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    lines += [
        f"setp.neu.f32 first, ${of_both[0]}, 0f3F800000;",
        f"setp.neu.or.f32 any, ${of_both[1]}, 0f3F800000, first;",
        "vote.sync.any.pred any, any, 0xffffffff;",
        "@!any bra DONE;",
    ]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return "\n".join(("{", ".reg .pred first, any;", *lines, "DONE:", "}"))


_SUMS = 32
_SHRINK = gl.constexpr(_scale_unless_one(_SUMS))
_OPERANDS = gl.constexpr(",".join(["=f"] * _SUMS + ["f"] * (2 * _SUMS)))


@_jit
def shrink_sums(acc, factor):
    """As `scale`, with little to do where the factors are 1."""
    layout: constexpr = gl.SliceLayout(1, acc.type.layout)
    factor = gl.expand_dims(gl.convert_layout(factor, layout), 1)
    acc, factor = gl.broadcast(acc, factor)
    return gl.inline_asm_elementwise(
        _SHRINK, _OPERANDS, [acc, factor], gl.float32, is_pure=True, pack=32
    )
