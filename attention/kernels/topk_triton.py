"""Exact top-k of index scores on a GPU: the best k positions of each row, by ascending position.

The order is that of `topk.top_k`: the higher score first, at equal scores the lower position, NaN
behind everything. Nothing here counts on a distribution: the k-th best key is found by counting.

One program keeps a row (or a piece of one) in registers as int32 keys that order like the scores.
It narrows [low, high) until exactly k keys are at least `low`, or until the two are neighbours
and the keys equal to `low` are ties, which are taken by position. A pivot is guessed between the
two counts, in turn with the middle of the interval: of values at first, of keys later, which ends
after at most 31 halvings whatever the scores are. A second walk over the row, which is in the L2
cache by then, packs what was chosen.

Rows longer than BLOCK_MAX are cut: every piece gives its own best k, in order of position, and the
same kernel selects among these. A piece's best k hold all that the row's best k has of it, and
candidates in order of position tie as positions do.

Floor: 4 bytes read per score and 4 k written a row: 128 rows of 32k take 4.1 us at 4.2 TB/s.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, jit, power_of_two

K_MAX = 2048
# 32 keys in each of 1024 threads: half of a Hopper multiprocessor's registers.
BLOCK_MAX: tl.constexpr = tl.constexpr(32768)
# Rows to have before the first cut of long ones makes the longest pieces.
MANY_PIECES = 64

# Below every key of a score, -inf included; different halves, see _threshold.
OUTSIDE: tl.constexpr = tl.constexpr(-(2**31))
NAN_KEY: tl.constexpr = tl.constexpr(-(2**31) + 2)


@dataclass(frozen=True)
class PagedSlots:
    """Turns positions into cache slots: table_BP int32 pages, request_T int32 row -> request."""

    table_BP: Tensor
    request_T: Tensor
    page_size: int


@dataclass(frozen=True)
class _Candidates:
    """What one pass chooses from, and how rows were cut before it.

    scores_TL: fp32. positions_TL: what each column stands for, itself where None. first_piece: the
    piece length of the first cut, 0 before any; later_cuts: cuts after it, all by BLOCK_MAX.
    """

    scores_TL: Tensor
    positions_TL: Tensor | None = None
    first_piece: int = 0
    later_cuts: int = 0


def select_top_k(
    scores_TL: Tensor,
    visible_T: Tensor,
    k: int,
    *,
    slots: PagedSlots | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """int32 [T, k]: positions (or cache slots) of the best min(k, visible), ascending, then -1.

    scores_TL: fp32, the last dimension contiguous; what stands at or behind visible_T[t] does not
    matter. visible_T: int32, negative counts as 0, more than L as L. Nothing is read back to the
    host, so that calls can be captured in a graph. Raises ValueError for k outside 1..2048 and
    TypeError for other dtypes.
    """
    if not 1 <= k <= K_MAX:
        raise ValueError(f"k is 1 to {K_MAX}, got {k}")
    if scores_TL.dtype != torch.float32 or visible_T.dtype != torch.int32:
        raise TypeError(
            f"scores are float32 and lengths int32, got {scores_TL.dtype} and {visible_T.dtype}"
        )
    if scores_TL.stride(1) != 1:
        raise ValueError(f"a row's scores must be contiguous, got strides {scores_TL.stride()}")
    rows, length = scores_TL.shape
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=scores_TL.device)
    if not rows:
        return out
    source, columns = _Candidates(scores_TL), length
    while columns > BLOCK_MAX.value:
        piece = BLOCK_MAX.value if source.first_piece else _first_piece(rows, length, k)
        columns = ceil_div(columns, piece) * k
        best_TL = scores_TL.new_empty(rows, columns)
        places_TL = torch.empty(rows, columns, dtype=torch.int32, device=scores_TL.device)
        _launch(source, (visible_T, length), k, piece, (places_TL, best_TL), None)
        cuts = source.later_cuts + 1 if source.first_piece else 0
        source = _Candidates(best_TL, places_TL, source.first_piece or piece, cuts)
    _launch(source, (visible_T, length), k, max(columns, 1), (out, None), slots)
    return out


def _first_piece(rows: int, length: int, k: int) -> int:
    """Few rows are cut finer, so that more of the GPU takes part; never finer than 8 k or 8192."""
    if rows * ceil_div(length, BLOCK_MAX.value) >= MANY_PIECES:
        return BLOCK_MAX.value
    return min(BLOCK_MAX.value, max(8 * power_of_two(k), 8192))


def _launch(
    source: _Candidates,
    visible: tuple[Tensor, int],
    k: int,
    piece: int,
    out: tuple[Tensor, Tensor | None],
    slots: PagedSlots | None,
) -> None:
    scores_TL, (visible_T, length) = source.scores_TL, visible
    rows, columns = scores_TL.shape
    block = max(power_of_two(min(piece, columns)), 128)
    num_warps = max(4, min(32, block // 1024))
    aligned = not any(size % 4 for size in (columns, piece, scores_TL.stride(0)))
    places, best = out
    _select[(rows, ceil_div(max(columns, 1), piece))](
        scores_TL,
        source.positions_TL,
        visible_T,
        places,
        best,
        slots.table_BP if slots else None,
        slots.request_T if slots else None,
        scores_TL.stride(0),
        places.stride(0),
        slots.table_BP.stride(0) if slots else 0,
        length,
        source.first_piece,
        source.later_cuts,
        piece,
        k,
        PAGE=slots.page_size if slots else 1,
        ALIGN=4 if aligned else 1,
        BLOCK=block,
        TILE=min(block, num_warps * 128),
        num_warps=num_warps,
    )


@jit
def _keys_of(scores, inside):
    """int32 that orders like the scores: -0.0 as 0.0, NaN below -inf, places outside lowest."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(scores != scores, NAN_KEY, keys)
    return tl.where(inside, keys, OUTSIDE)


@jit
def _load(scores_ptr, columns, count, ALIGN: tl.constexpr):
    """Scores, and which of them count. Up to ALIGN - 1 more are read, so that loads are wide."""
    readable = (count + ALIGN - 1) // ALIGN * ALIGN
    return tl.load(scores_ptr + columns, mask=columns < readable, other=0.0), columns < count


@jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _pivot(low, high, count_low, count_high, k, turn):
    """A half key inside (low, high): guessed from the counts on odd turns, else the middle."""
    middle = (low + high) >> 1
    bottom = _value_of(low << 1)
    share = (count_low - k).to(tl.float32) / (count_low - count_high).to(tl.float32)
    share = tl.where(turn % 2 == 1, share, 0.5)
    guess = bottom + (_value_of(high << 1) - bottom) * share
    finite = (guess - guess) == 0.0
    bits = tl.where(finite, guess, 0.0).to(tl.int32, bitcast=True)
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 1
    by_value = finite & ((turn % 2 == 1) | (turn < 8))
    pivot = tl.where(by_value, bits, middle)
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1)


@jit
def _count_above(scores_ptr, count, key, ALIGN: tl.constexpr, TILE: tl.constexpr):
    found = tl.zeros((TILE,), tl.int32)
    first = 0
    while first < count:
        columns = first + tl.arange(0, TILE)
        scores, inside = _load(scores_ptr, columns, count, ALIGN)
        found += (_keys_of(scores, inside) > key).to(tl.int32)
        first += TILE
    return tl.sum(found)


@jit
def _threshold(scores_ptr, count, k, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """(low, strict, ties) of more than k scores: the k best are all keys at or above `strict` and
    the first `ties` of those from `low` on."""
    columns = tl.arange(0, BLOCK)
    scores, inside = _load(scores_ptr, columns, count, ALIGN)
    # Half keys: their differences do not overflow, and the sign of a difference counts.
    halves = _keys_of(scores, inside) >> 1
    high = tl.max(halves) + 1
    low = tl.min(tl.where(inside, halves, 0x3FFFFFFF))
    count_low = count
    count_high = 0
    turn = 1
    while (high - low > 1) & (count_low != k):
        pivot = _pivot(low, high, count_low, count_high, k, turn)
        above = BLOCK + tl.sum((halves - pivot) >> 31)
        enough = above >= k
        low = tl.where(enough, pivot, low)
        count_low = tl.where(enough, above, count_low)
        high = tl.where(enough, high, pivot)
        count_high = tl.where(enough, count_high, above)
        turn += 1
    low = low << 1
    strict = low
    ties = 0
    if count_low != k:
        # The half key stands for two keys, low and low + 1. Rare, or a row full of ties.
        above = _count_above(scores_ptr, count, low, ALIGN, TILE)
        upper = above >= k
        strict = tl.where(upper, low + 2, low + 1)
        ties = k - tl.where(upper, count_high, above)
        low = tl.where(upper, low + 1, low)
    return low, strict, ties


@jit
def _num_candidates(seen, first_piece, later_cuts, k):
    """Candidates of a row with `seen` visible scores: all pieces but the last one give k."""
    if first_piece > 0:
        seen = seen // first_piece * k + tl.minimum(seen % first_piece, k)
        for _ in range(later_cuts):
            seen = seen // BLOCK_MAX * k + tl.minimum(seen % BLOCK_MAX, k)
    return seen


@jit
def _select(
    scores_ptr,
    positions_ptr,
    visible_ptr,
    out_ptr,
    best_ptr,
    table_ptr,
    request_ptr,
    score_stride,
    out_stride,
    table_stride,
    length,
    first_piece,
    later_cuts,
    piece,
    k,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (t, s): the best k of columns s * piece ... of row t, into columns s * k ... of out.

    positions_ptr: what the columns stand for, themselves where None. best_ptr: where not None, the
    chosen scores. table_ptr: where not None, positions are written as cache slots. ALIGN divides
    the columns of a row, piece and score_stride.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * piece
    seen = tl.maximum(tl.minimum(tl.load(visible_ptr + row), length), 0)
    count = _num_candidates(seen, first_piece, later_cuts, k) - start
    count = tl.maximum(tl.minimum(count, piece), 0)
    scores_ptr += row * score_stride + start
    out_ptr += row * out_stride + tl.program_id(1) * k
    if positions_ptr is not None:
        positions_ptr += row * score_stride
    if best_ptr is not None:
        best_ptr += row * out_stride + tl.program_id(1) * k
    if table_ptr is not None:
        table_ptr += tl.load(request_ptr + row).to(tl.int64) * table_stride

    # Few enough: all that are inside.
    low = OUTSIDE + 1
    strict = OUTSIDE + 1
    ties = 0
    if count > k:
        low, strict, ties = _threshold(scores_ptr, count, k, ALIGN, BLOCK, TILE)

    taken = 0
    tied = 0
    first = 0
    while first < count:
        columns = first + tl.arange(0, TILE)
        scores, inside = _load(scores_ptr, columns, count, ALIGN)
        keys = _keys_of(scores, inside)
        sure = keys >= strict
        tie = (keys >= low) & (keys < strict)
        # Both ranks from one scan: TILE is at most 4096, so neither half overflows.
        marks = sure.to(tl.int32) + (tie.to(tl.int32) << 16)
        ranks = tl.cumsum(marks, 0) - marks
        rank_tie = tied + (ranks >> 16)
        place = taken + (ranks & 0xFFFF) + tl.minimum(rank_tie, ties)
        chosen = sure | (tie & (rank_tie < ties))
        position = _position(positions_ptr, table_ptr, start + columns, chosen, PAGE)
        tl.store(out_ptr + place, position, mask=chosen)
        if best_ptr is not None:
            tl.store(best_ptr + place, scores, mask=chosen)
        sums = tl.sum(marks)
        taken += sums & 0xFFFF
        tied += sums >> 16
        first += TILE
    if best_ptr is None:
        _fill(out_ptr, tl.minimum(count, k), k, TILE)


@jit
def _position(positions_ptr, table_ptr, columns, chosen, PAGE: tl.constexpr):
    """What is written for a chosen column: its position in the row, or that position's slot."""
    position = columns
    if positions_ptr is not None:
        position = tl.load(positions_ptr + columns, mask=chosen, other=0)
    if table_ptr is not None:
        page = tl.load(table_ptr + position // PAGE, mask=chosen, other=0)
        position = page * PAGE + position % PAGE
    return position


@jit
def _fill(out_ptr, first, k, TILE: tl.constexpr):
    """-1 into the places behind the chosen ones."""
    while first < k:
        columns = first + tl.arange(0, TILE)
        tl.store(out_ptr + columns, tl.full((TILE,), -1, tl.int32), mask=columns < k)
        first += TILE
