"""Top-k of long rows by many programs each: candidates first, then a choice among them.

Every program of a row takes the same few scores of it, evenly spread, and finds the same value that
the k-th best most likely reaches (`topk_search.likely_range`). It keeps what is above that value in
its own part of the row: two or three times k in all. One program a row then chooses from the
candidates, which lie in order of position. They are all scores above some value, so that the best k
are among them wherever they are k or more; a row with fewer, or with more than there is room for,
is read once for every bit of a score instead.
"""

from dataclasses import dataclass
from math import isqrt

import torch
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, jit, power_of_two
from .topk_search import (
    DROPPED,
    FEW,
    count_steps,
    keys_of,
    likely_range,
    new_counters,
    step_of_threshold,
)
from .topk_write import PagedSlots, store_some, write, write_all, write_exactly

# Candidates of a part lie in groups of so many places.
GROUP: tl.constexpr = tl.constexpr(32)
# Below what orders any score.
LOWEST: tl.constexpr = tl.constexpr(-(2**63))
# More candidates of a part are not kept: all of a row may lie in one.
MOST_OF_A_PART = 8192
# A part is whole lines of 128 bytes.
LINE: tl.constexpr = tl.constexpr(32)
# Of a part's program.
NUM_WARPS = 8


@dataclass(frozen=True)
class Sharing:
    """How rows are shared out: parts of a row, columns of a block of one, scores of the sample;
    places for candidates, and warps of the program that chooses from them."""

    parts: int
    block: int
    sample: int
    places: int
    choosing_warps: int

    @classmethod
    def of(cls, rows: int, length: int) -> "Sharing":
        """The quickest of those timed on an H200: 64 parts of a single row, 16 of each of 8 rows, 4
        of each of 128. Thousands of rows fill a GPU as they are.

        A larger sample says more, but every part reads all of it. Up to a million columns at most
        one random row in 1300 is misjudged by it, by the distribution of its ranks.
        """
        parts = 1 << (max(isqrt(4096 // rows), 1).bit_length() - 1)
        part = ceil_div(length, parts)
        block = 2048 if part <= 8192 else 4096
        if length > 1 << 18:
            return cls(parts, block, 4096, 16384, 32)
        return cls(parts, block, 1024 if part <= 2048 else 2048, 8192, 16)


def aligned(scores_TL: Tensor) -> bool:
    """Whether four scores from a column that four divides lie on a boundary of 16 bytes."""
    sizes = (scores_TL.shape[1], scores_TL.stride(0), scores_TL.data_ptr() // 4)
    return not any(size % 4 for size in sizes)


@dataclass(frozen=True)
class Candidates:
    """Of each part of each row [T, parts, room]: scores and int32 columns; counts_TP says how many
    there are or, where it is more than the room, would have been. ranges_T2: `likely_range`."""

    scores_TPX: Tensor
    columns_TPX: Tensor
    counts_TP: Tensor
    ranges_T2: Tensor


def select_by_parts(
    scores_TL: Tensor,
    visible_T: Tensor,
    out: Tensor,
    slots: PagedSlots | None,
    compiled: bool,
    how: Sharing | None = None,
) -> None:
    """`topk_triton.select_top_k` into out. compiled: whether kernels may hold PTX."""
    how = how or Sharing.of(*scores_TL.shape)
    candidates = collect(scores_TL, visible_T, out.shape[1], how, compiled)
    choose(scores_TL, visible_T, candidates, out, slots, how, compiled)


def collect(
    scores_TL: Tensor, visible_T: Tensor, k: int, how: Sharing, compiled: bool
) -> Candidates:
    """Of rows with more than k visible scores; others have none."""
    rows, length = scores_TL.shape
    longest = power_of_two(max(ceil_div(length, how.parts), LINE.value)) + LINE.value
    room = min(MOST_OF_A_PART, longest)
    found_TPX = scores_TL.new_empty(rows, how.parts, room)
    columns_TPX = torch.empty_like(found_TPX, dtype=torch.int32)
    counts_TP, ranges_T2 = columns_TPX.new_empty(rows, how.parts), found_TPX.new_empty(rows, 2)
    _collect[(rows, how.parts)](
        scores_TL,
        visible_T,
        found_TPX,
        columns_TPX,
        counts_TP,
        ranges_T2,
        scores_TL.stride(0),
        length,
        k,
        PARTS=how.parts,
        ROOM=room,
        ALIGN=4 if aligned(scores_TL) else 1,
        BLOCK=how.block,
        SAMPLE=how.sample,
        COMPILED=compiled,
        num_warps=NUM_WARPS,
    )
    return Candidates(found_TPX, columns_TPX, counts_TP, ranges_T2)


def choose(
    scores_TL: Tensor,
    visible_T: Tensor,
    candidates: Candidates,
    out: Tensor,
    slots: PagedSlots | None,
    how: Sharing,
    compiled: bool,
) -> None:
    """The best k of each row's candidates; of the row itself, where these do not hold them."""
    rows, length = scores_TL.shape
    _choose[(rows,)](
        scores_TL,
        visible_T,
        candidates.scores_TPX,
        candidates.columns_TPX,
        candidates.counts_TP,
        candidates.ranges_T2,
        slots.table_BP if slots else None,
        slots.request_T if slots else None,
        out,
        scores_TL.stride(0),
        slots.table_BP.stride(0) if slots else 0,
        out.stride(0),
        length,
        out.shape[1],
        PARTS=how.parts,
        ROOM=candidates.scores_TPX.shape[2],
        PLACES=how.places,
        PAGE=slots.page_size if slots else 1,
        COMPILED=compiled,
        num_warps=how.choosing_warps,
    )


@jit
def _load_block(scores_ptr, columns, last, ALIGN: tl.constexpr):
    """Scores, NaN from `last` on; up to ALIGN - 1 more are read, so that loads are wide."""
    readable = (last + ALIGN - 1) // ALIGN * ALIGN
    scores = tl.load(scores_ptr + columns, mask=columns < readable, other=float("nan"))
    return tl.where(columns < last, scores, float("nan"))


@jit
def _collect(
    scores_ptr,
    visible_ptr,
    found_ptr,
    columns_ptr,
    counts_ptr,
    ranges_ptr,
    score_stride,
    length,
    k,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (t, p): candidates of part p of row t, and how many there are.

    found_ptr, columns_ptr: ROOM scores and their columns for each part; what does not fit is
    counted all the same. ranges_ptr: scale and shift of the row's steps.
    """
    t = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1)
    count = tl.maximum(tl.minimum(tl.load(visible_ptr + t), length), 0)
    if count > k:
        # So that the compiler knows what ALIGN divides.
        scores_ptr += t * (score_stride // ALIGN * ALIGN)
        part = tl.cdiv(tl.cdiv(count, PARTS), LINE) * LINE
        first = p * part
        last = tl.minimum(first + part, count)
        place = (t * PARTS + p) * ROOM
        numbers = tl.arange(0, BLOCK)
        scores = _load_block(scores_ptr, first + numbers, last, ALIGN)
        counters = new_counters(count, COMPILED)
        scale, shift = likely_range(scores_ptr, count, k, counters, SAMPLE, COMPILED)
        found = 0
        for begin in range(first, last, BLOCK):
            columns = begin + numbers
            following = _load_block(scores_ptr, columns + BLOCK, last, ALIGN)
            # In one rounding, as steps are made: the two must agree.
            taken = tl.fma(scores, scale, shift) > 0.0
            marks = taken.to(tl.int32)
            places = found + tl.cumsum(marks, 0) - 1
            fits = taken & (places < ROOM)
            store_some(found_ptr + place + places, scores, fits, COMPILED)
            store_some(columns_ptr + place + places, columns, fits, COMPILED)
            found += tl.sum(marks)
            scores = following
        # They are read by four.
        rest = found + tl.arange(0, 4)
        behind = (rest < (found + 3) // 4 * 4) & (rest < ROOM)
        tl.store(found_ptr + place + rest, 0.0, mask=behind)
        tl.store(columns_ptr + place + rest, 0, mask=behind)
        tl.store(counts_ptr + t * PARTS + p, found)
        if p == 0:
            tl.store(ranges_ptr + 2 * t, scale)
            tl.store(ranges_ptr + 2 * t + 1, shift)
    else:
        tl.store(counts_ptr + t * PARTS + p, 0)
        tl.store(ranges_ptr + 2 * t, 0.0)
        tl.store(ranges_ptr + 2 * t + 1, 0.0)


@jit
def _cut(keys, columns, tied, ties, excess, memory, COMPILED: tl.constexpr):
    """(key, column) of the last of the `ties` tied ones, at most FEW, without the `excess` worst.

    memory: address of 8 FEW bytes of shared memory.
    """
    if COMPILED:
        places = memory + 8 * (tl.cumsum(tied.to(tl.int32), 0) - 1)
        tl.inline_asm_elementwise(
            """{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3};
            mov.b32 $0, 0; }""",
            "=r,r,r,r,r",
            [places, keys, columns, tied.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
        numbers = tl.arange(0, FEW)
        keys, columns = tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];",
            "=r,=r,r",
            [memory + 8 * numbers],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        orders = (keys.to(tl.int64) << 32) - columns
        orders = tl.where(numbers < ties, orders, LOWEST)
        better = tl.sum((orders[None, :] > orders[:, None]).to(tl.int32), 1)
        last = tl.sum(tl.where((better == ties - excess - 1) & (numbers < ties), orders, 0))
    else:
        orders = (keys.to(tl.int64) << 32) - columns
        orders = tl.where(tied, orders, DROPPED)
        for _ in range(excess):
            orders = tl.where(orders == tl.min(orders), DROPPED, orders)
        last = tl.min(orders)
    column = (-last).to(tl.int32) & 0x7FFFFFFF
    return ((last + column) >> 32).to(tl.int32), column


@jit
def _choose(
    scores_ptr,
    visible_ptr,
    found_ptr,
    columns_ptr,
    counts_ptr,
    ranges_ptr,
    table_ptr,
    request_ptr,
    out_ptr,
    score_stride,
    table_stride,
    out_stride,
    length,
    k,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    PLACES: tl.constexpr,
    PAGE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program t: the best k of row t's candidates, which must fit PLACES in groups."""
    groups: tl.constexpr = PLACES // GROUP
    t = tl.program_id(0).to(tl.int64)
    # In front of what depends on the number of scores, so that all is under way at once.
    counts = tl.load(counts_ptr + t * PARTS + tl.arange(0, PARTS))
    scale = tl.load(ranges_ptr + 2 * t)
    shift = tl.load(ranges_ptr + 2 * t + 1)
    count = tl.maximum(tl.minimum(tl.load(visible_ptr + t), length), 0)
    if table_ptr is not None:
        table_ptr += tl.load(request_ptr + t).to(tl.int64) * table_stride
    row = (scores_ptr + t * score_stride, table_ptr, out_ptr + t * out_stride)
    if count <= k:
        write_all(row, count, k, PLACES, PAGE, COMPILED)
    else:
        counters = new_counters(count, COMPILED)
        own_groups = (tl.minimum(counts, ROOM) + GROUP - 1) // GROUP
        ends = tl.cumsum(own_groups, 0)
        used = tl.sum(own_groups)
        fits = (used <= groups) & (tl.max(counts) <= ROOM)
        # Which part a group is of, and how many groups are before that part, in one sum.
        group = tl.arange(0, groups)
        before = tl.where(ends[None, :] <= group[:, None], 1 + own_groups[None, :] * 256, 0)
        both = tl.sum(before, 1)
        held = tl.load(counts_ptr + t * PARTS + both % 256, mask=both % 256 < PARTS, other=0)
        number = tl.arange(0, PLACES)
        own = number // GROUP
        both = tl.gather(both, own, 0)
        held = tl.minimum(tl.gather(held, own, 0), ROOM)
        offset = number - both // 256 * GROUP
        # What the compiler does not see: neighbours, four at a time.
        place = tl.max_contiguous(tl.multiple_of(both % 256 * ROOM + offset, 4), 4)
        readable = tl.max_constancy(offset < (held + 3) // 4 * 4, 4)
        first = t * PARTS * ROOM
        scores = tl.load(found_ptr + first + place, mask=readable, other=0.0)
        columns = tl.load(columns_ptr + first + place, mask=readable, other=0)
        scores = tl.where(offset < held, scores, float("nan"))
        steps = count_steps(scores, scale, shift, counters, COMPILED)
        step, above, reach = step_of_threshold(steps, k, counters, COMPILED)
        if (step == 0) | (reach - above > FEW) | (fits == 0):
            write_exactly(row, count, k, PLACES, PAGE, COMPILED)
        else:
            taken = steps >= step
            if reach > k:
                keys = keys_of(scores)
                key, column = _cut(
                    keys, columns, steps == step, reach - above, reach - k, counters, COMPILED
                )
                taken &= (steps > step) | (keys > key) | ((keys == key) & (columns <= column))
            places = tl.cumsum(taken.to(tl.int32), 0) - 1
            write(row, columns, places, taken, PAGE, COMPILED)
