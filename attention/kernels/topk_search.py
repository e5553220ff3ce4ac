"""Where the k-th best of a row of scores is: between which two of 2047 steps, found by counting.

A few scores of the row, evenly spread, say between which values the k-th best should be. That range
is cut into steps, each score becomes the number of its step, and one pass over the row counts how
many scores each step has: exact whatever the sample said, for a score's step never falls where the
score rises. Steps are numbered in 16 bits and kept two to a register, as float16 whose order is
that of their bits.

The compiled parts count in shared memory, for which Triton has no words. What several threads hold
a copy of is counted as often, so what they are given must have a dimension of a multiple of all
threads, which the compiler spreads over these.
"""

import struct

import triton.language as tl

from .launch import jit

# Steps, the first of which holds all that lies below the range and is not counted.
STEPS: tl.constexpr = tl.constexpr(2048)
# As many scores may share the threshold's step; a row with more is read in another way.
FEW: tl.constexpr = tl.constexpr(64)
# Above what orders any score.
DROPPED: tl.constexpr = tl.constexpr(2**63 - 1)
# Two counters' sums in one integer.
HALF: tl.constexpr = tl.constexpr(1 << 16)

# Keys of what is no score, and of NaN, just below -inf.
OUTSIDE: tl.constexpr = tl.constexpr(-(2**31))
NAN_KEY: tl.constexpr = tl.constexpr(-(2**31) + 2)

# A score X to its step, in the lower half of Y: what is added makes the number's last bits those of
# an integer. COUNTERS is moved by what the upper bits add to an address.
_STEP = """
    fma.rn.sat.f32 y, X, SCALE, SHIFT; fma.rn.f32 y, y, LAST, 0f4B000000;
    mov.b32 Y, y; setp.gt.f32 p, y, 0f4B000000; mad.lo.u32 to, Y, 4, COUNTERS;
    @p red.shared.add.u32 [to], 1;
"""
_MOVED: tl.constexpr = tl.constexpr(0x2C000000)


def _steps(*scores: str) -> str:
    """PTX that counts one or two scores and gives their steps as $0."""
    first = len(scores) + 1
    names = {"SCALE": f"${first}", "SHIFT": f"${first + 1}", "COUNTERS": f"${first + 2}"}
    names["LAST"] = "0f" + struct.pack(">f", STEPS.value - 1).hex()
    text = "{ .reg .f32 y; .reg .pred p; .reg .b32 to, step0, step1; mov.b32 step1, 0;"
    for number, score in enumerate(scores):
        text += _STEP.replace("X", score).replace("Y", f"step{number}")
    for name, value in names.items():
        text = text.replace(name, value)
    return text + "prmt.b32 $0, step0, step1, 0x5410; }"


_STEP_OF_ONE: tl.constexpr = tl.constexpr(_steps("$1"))
_STEPS_OF_TWO: tl.constexpr = tl.constexpr(_steps("$1", "$2"))


@jit
def keys_of(scores):
    """int32 that orders like the scores: -0.0 as 0.0, NaN last."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(scores == scores, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@jit
def new_counters(anything, COMPILED: tl.constexpr):
    """The address of STEPS counters, all zero; once in a kernel. anything: an int32."""
    counters = 0
    if COMPILED:
        counters = tl.inline_asm_elementwise(
            "{ .shared .align 16 .b8 counters[8192]; mov.u32 $0, counters; }",
            "=r,r",
            [anything],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], 0; mov.b32 $0, 0;",
            "=r,r",
            [counters + 4 * tl.arange(0, STEPS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
    return counters


@jit
def _step_of(scores, scale, shift):
    share = scores * scale + shift
    share = tl.where(share == share, tl.minimum(tl.maximum(share, 0.0), 1.0), 0.0)
    return (share * (STEPS - 1) + 0.5).to(tl.int32)


@jit
def count_steps(scores, scale, shift, counters, COMPILED: tl.constexpr):
    """Each score's step, int32; counts them."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            _STEP_OF_ONE,  # pyright: ignore
            "=r,f,f,f,r",
            [scores, scale, shift, counters - _MOVED],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return _step_of(scores, scale, shift)


@jit
def _steps_of_pairs(even, odd, scale, shift, counters, COMPILED: tl.constexpr):
    """Steps of two scores in an int32, the first in the lower half; counts them."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            _STEPS_OF_TWO,  # pyright: ignore
            "=r,f,f,f,f,r",
            [even, odd, scale, shift, counters - _MOVED],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return _step_of(even, scale, shift) | (_step_of(odd, scale, shift) << 16)


@jit
def _take_counts(counters, steps, COMPILED: tl.constexpr):
    """How many scores reach each step. steps: what was counted, one to an int32."""
    if COMPILED:
        tl.debug_barrier()
        counts = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1]; st.shared.b32 [$1], 0;",
            "=&r,r",
            [counters + 4 * tl.arange(0, STEPS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
    else:
        counts = tl.histogram(steps, STEPS)
    counts = tl.where(tl.arange(0, STEPS) == 0, 0, counts)
    return tl.sum(counts) - tl.cumsum(counts, 0) + counts


@jit
def likely_range(scores_ptr, count, k, counters, SAMPLE: tl.constexpr, COMPILED: tl.constexpr):
    """(scale, shift) that take the values around the k-th best of `count` scores to 0 ... 1.

    The range leaves four standard deviations of a rank among the sample to each side.
    """
    columns = tl.arange(0, SAMPLE) * tl.maximum(count // SAMPLE, 1)
    inside = columns < count
    sample = tl.load(scores_ptr + columns, mask=inside, other=float("nan"))
    finite = (sample - sample) == 0.0
    least = tl.min(tl.where(finite, sample, float("inf")))
    most = tl.max(tl.where(finite, sample, float("-inf")))
    span = most - least
    scale = 1.0 / span
    shift = -least * scale
    steps = count_steps(sample, scale, shift, counters, COMPILED)
    reach = _take_counts(counters, steps, COMPILED).to(tl.float32)
    rank = k * (tl.minimum(count, SAMPLE) / count.to(tl.float32))
    apart = 4.0 * tl.sqrt(rank) + 1.0
    counted = tl.arange(0, STEPS) > 0
    low = (counted & (reach >= rank + apart)).to(tl.int32)
    high = (counted & (reach >= rank - apart)).to(tl.int32)
    both = tl.sum(low + high * HALF)
    low, high = both % HALF, both // HALF
    unit = span / (STEPS - 1)
    bottom = least + tl.where(low > 0, low - 0.5, -STEPS / 4) * unit
    top = least + (high + 0.5) * unit
    # What is beyond the best of the sample nobody knows.
    top = tl.where(rank > apart, top, most + 2.0 * (most - bottom))
    scale = 1.0 / (top - bottom)
    return scale, -bottom * scale


@jit
def _load_four(
    scores_ptr, first, count, ALIGN: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    """SIZE scores, four neighbours a lane: four times [rounds, LANES], NaN behind `count`.

    Up to ALIGN - 1 more are read, so that loads are wide.
    """
    rounds: tl.constexpr = SIZE // (4 * LANES)
    if ALIGN == 4:
        columns = first + tl.arange(0, SIZE)
        if first + SIZE <= count:
            scores = tl.load(scores_ptr + columns)
        else:
            readable = (count + ALIGN - 1) // ALIGN * ALIGN
            scores = tl.load(scores_ptr + columns, mask=columns < readable, other=float("nan"))
            scores = tl.where(columns < count, scores, float("nan"))
        even, odd = tl.split(tl.reshape(scores, (rounds, LANES, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        columns = first + 4 * (tl.arange(0, rounds)[:, None] * LANES + tl.arange(0, LANES)[None, :])
        nan = float("nan")
        a = tl.load(scores_ptr + columns, mask=columns < count, other=nan)
        b = tl.load(scores_ptr + columns + 1, mask=columns + 1 < count, other=nan)
        c = tl.load(scores_ptr + columns + 2, mask=columns + 2 < count, other=nan)
        d = tl.load(scores_ptr + columns + 3, mask=columns + 3 < count, other=nan)
    return a, b, c, d


@jit
def _load_part(
    scores_ptr,
    first,
    count,
    scaling,
    counters,
    ALIGN: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Steps of SIZE scores, which are counted, in pairs: twice int32 [rounds, LANES]."""
    a, b, c, d = _load_four(scores_ptr, first, count, ALIGN, SIZE, LANES)
    scale, shift = scaling
    return (
        _steps_of_pairs(a, b, scale, shift, counters, COMPILED),
        _steps_of_pairs(c, d, scale, shift, counters, COMPILED),
    )


@jit
def _stack(a, b, c, d):
    """Four times [rounds, lanes] as [4 rounds, lanes]."""
    joined = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (3, 2, 0, 1))
    return tl.reshape(joined, (4 * a.shape[0], a.shape[1]))


@jit
def steps_of_row(
    scores_ptr,
    count,
    scaling,
    counters,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """`_load_part` of all, in parts where they would take too many registers before."""
    part: tl.constexpr = BLOCK // 4
    args = (count, scaling, counters)
    if BLOCK < 32 * LANES:
        pairs = _load_part(scores_ptr, 0, *args, ALIGN, BLOCK, LANES, COMPILED)
    else:
        a, e = _load_part(scores_ptr, 0, *args, ALIGN, part, LANES, COMPILED)
        b, f = _load_part(scores_ptr, part, *args, ALIGN, part, LANES, COMPILED)
        c, g = _load_part(scores_ptr, 2 * part, *args, ALIGN, part, LANES, COMPILED)
        d, h = _load_part(scores_ptr, 3 * part, *args, ALIGN, part, LANES, COMPILED)
        pairs = (_stack(a, b, c, d), _stack(e, f, g, h))
    return pairs


@jit
def _further(steps, above, reach, other_steps, other_above, other_reach):
    return steps + other_steps, tl.maximum(above, other_above), tl.minimum(reach, other_reach)


@jit
def single_steps(pairs):
    """Pairs' steps, one to an int32, in no order."""
    pairs = tl.join(pairs[0], pairs[1])
    return tl.reshape(tl.join(pairs & 0xFFFF, pairs >> 16), (2 * pairs.numel,))


@jit
def step_of_threshold(steps, k, counters, COMPILED: tl.constexpr):
    """(step, above, reach): the highest step that k scores reach, 0 where none of them is; how many
    are above it; how many reach it. steps: of what was counted, looked at in the interpreter."""
    counts = _take_counts(counters, steps, COMPILED)
    enough = counts >= k
    above = tl.where(enough, 0, counts)
    reach = tl.where(enough, counts, 1 << 30)
    enough = (enough & (tl.arange(0, STEPS) > 0)).to(tl.int32)
    if COMPILED:
        return tl.reduce((enough, above, reach), 0, _further)
    else:
        # The interpreter goes through a reduction of several by one element at a time.
        return tl.sum(enough), tl.max(above), tl.min(reach)


@jit
def reaching(pairs, step, COMPILED: tl.constexpr):
    """All bits of each half whose step is at least `step`."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "set.ge.u32.f16x2 $0, $1, $2;",
            "=r,r,r",
            [pairs, step | (step << 16)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        even = tl.where((pairs & 0xFFFF) >= step, 0xFFFF, 0)
        return even | tl.where((pairs >> 16) >= step, -65536, 0)


@jit
def threshold_by_halves(scores_ptr, count, k, STEP: tl.constexpr):
    """(key, ties): the k-th best key, and how many of its equals are among the best k.

    For rows full of equals, of NaN or of infinities: the row is read once for every bit of a key.
    """
    key = OUTSIDE
    if _count_keys(scores_ptr, count, 0, STEP) >= k:
        key = 0
    for turn in range(31):
        trial = key | (1 << (30 - turn))
        if _count_keys(scores_ptr, count, trial, STEP) >= k:
            key = trial
    return key, k - _count_keys(scores_ptr, count, key + 1, STEP)


@jit
def _count_keys(scores_ptr, count, least, STEP: tl.constexpr):
    """How many scores have keys of at least `least`."""
    columns = tl.arange(0, STEP)
    found = tl.zeros((STEP,), tl.int32)
    for first in range(0, count, STEP):
        inside = first + columns < count
        keys = keys_of(tl.load(scores_ptr + first + columns, mask=inside, other=0.0))
        found += (inside & (keys >= least)).to(tl.int32)
    return tl.sum(found)
