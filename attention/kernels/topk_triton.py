"""Exact top-k of index scores on a GPU: the best k positions of each row, by ascending position.

The order is that of `topk.top_k`: the higher score first, at equal scores the lower position, NaN
behind everything. Nothing here counts on a distribution: the k-th best key is found by counting.

One program keeps a row (or a piece of one) in registers as int32 keys that order like the scores.
It narrows [low, high) until exactly k keys are at least `low`, or until the two are neighbours
and the keys equal to `low` are ties, which are taken by position. The first pivots take scores for
normal, which sums over many heads nearly are: 6 counts instead of 15 find the best 512 or 2048 of
30,000 such sums. Later ones are guessed between the two counts, in turn with the middle of the
interval: of values at first, of keys then, which ends after at most 31 halvings whatever the scores
are. One scan of counts then says where each thread writes what it has of the chosen.

Rows longer than BLOCK_MAX are cut: every piece gives its own best k, in order of position, and the
same kernel selects among these. A piece's best k hold all that the row's best k has of it, and
candidates in order of position tie as positions do.

Floor: 4 bytes read per score and 4 k written a row: 128 rows of 32k take 4.1 us at 4.2 TB/s.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, jit, multiprocessors, power_of_two
from .topk_write import position_of, prefetch_row, ranks, write_chosen

K_MAX = 2048
# 64 keys in each of 512 threads: half of a Hopper multiprocessor's registers.
BLOCK_MAX: tl.constexpr = tl.constexpr(32768)
KEYS_OF_A_WARP = 2048
# Rows to have before the first cut of long ones makes the longest pieces.
MANY_PIECES = 64

# Pivots that take scores for normal.
GUESSES: tl.constexpr = tl.constexpr(3)

# Below every key of a score, -inf included; different halves, see _choose.
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
    block = max(power_of_two(min(piece, columns)), 1024)
    num_warps = max(4, block // KEYS_OF_A_WARP)
    aligned = not any(size % 4 for size in (columns, piece, scores_TL.stride(0)))
    places, best = out
    compiled = takes_assembly(scores_TL.device)
    at_once = multiprocessors(scores_TL.device)
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
        LANES=32 * num_warps,
        COMPILED=compiled,
        AHEAD=at_once if compiled and rows > at_once else 0,
        num_warps=num_warps,
    )


def takes_assembly(device: torch.device) -> bool:
    """Whether kernels for it may hold PTX: not in the interpreter, not on AMD's GPUs."""
    return device.type == "cuda" and torch.version.cuda is not None


@jit
def _keys_of(scores):
    """int32 that orders like the scores, NaN apart: -0.0 as 0.0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _load(scores_ptr, count, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Scores, and which of them count. Up to ALIGN - 1 more are read, so that loads are wide."""
    columns = tl.arange(0, BLOCK)
    readable = (count + ALIGN - 1) // ALIGN * ALIGN
    return tl.load(scores_ptr + columns, mask=columns < readable, other=0.0), columns < count


@jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _normal_guess(scores_ptr, count, k, SAMPLE: tl.constexpr):
    """Where the k-th best of `count` normal scores is, and how many lie in a unit there.

    Mean and deviation are those of an even sample; the quantile is Abramowitz and Stegun's 26.2.23.
    """
    columns = tl.arange(0, SAMPLE) * tl.maximum(count // SAMPLE, 1)
    inside = columns < count
    sample = tl.load(scores_ptr + columns, mask=inside, other=0.0)
    size = tl.minimum(count, SAMPLE).to(tl.float32)
    mean = tl.sum(sample) / size
    apart = tl.where(inside, sample - mean, 0.0)
    deviation = tl.sqrt(tl.sum(apart * apart) / size)
    share = (k + 0.0) / count
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(share, 1.0 - share)))
    above = 2.515517 + t * (0.802853 + t * 0.010328)
    z = t - above / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    density = count * 0.398942 * tl.exp(-0.5 * z * z) / deviation
    return mean + tl.where(share < 0.5, z, -z) * deviation, density


@jit
def _pivot(low, high, count_low, count_high, k, turn, guess):
    """A half key inside (low, high): from `guess` in the first turns; then guessed from the counts
    on odd turns, else the middle."""
    middle = (low + high) >> 1
    bottom = _value_of(low << 1)
    share = (count_low - k).to(tl.float32) / (count_low - count_high).to(tl.float32)
    share = tl.where(turn % 2 == 1, share, 0.5)
    between = bottom + (_value_of(high << 1) - bottom) * share
    value = tl.where(turn <= GUESSES, guess, between)
    finite = (value - value) == 0.0
    half = _keys_of(tl.where(finite, value, 0.0)) >> 1
    by_value = finite & ((turn % 2 == 1) | (turn < 8))
    pivot = tl.where(by_value, half, middle)
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1)


@jit
def _search(halves, count, k, guess, density, BLOCK: tl.constexpr):
    """(low, count_low, count_high): exactly k half keys are at least `low`, or more than k are and
    fewer than k are above it; count_high then says how many."""
    low = NAN_KEY >> 1
    high = tl.max(halves) + 1
    count_low = count
    count_high = 0
    turn = 1
    while (high - low > 1) & (count_low != k):
        pivot = _pivot(low, high, count_low, count_high, k, turn, guess)
        # The differences of half keys do not overflow: their signs count.
        above = BLOCK + tl.sum((halves - pivot) >> 31)
        # Past the aim by half of the step, so that the next count comes from the other side.
        guess += 1.5 * (above - k).to(tl.float32) / density
        enough = above >= k
        low = tl.where(enough, pivot, low)
        count_low = tl.where(enough, above, count_low)
        high = tl.where(enough, high, pivot)
        count_high = tl.where(enough, count_high, above)
        turn += 1
    return low, count_low, count_high


@jit
def _choose(
    row,
    start,
    count,
    k,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Write the best k of more than k scores. row: the pointers of `write_chosen`."""
    rounds: tl.constexpr = BLOCK // (4 * LANES)
    scores_ptr = row[0] + start
    scores, inside = _load(scores_ptr, count, ALIGN, BLOCK)
    # NaN and what is outside are told apart only where NaN is chosen.
    halves = tl.where(inside & (scores == scores), _keys_of(scores), NAN_KEY) >> 1
    guess, density = _normal_guess(scores_ptr, count, k, LANES)
    low, count_low, count_high = _search(halves, count, k, guess, density, BLOCK)
    if count_low == k:
        shaped = tl.reshape(halves, (rounds, LANES, 4))
        places = ranks((shaped >= low).to(tl.int32), LANES)
        write_chosen(row, places, shaped, low, start, PAGE, COMPILED)
    else:
        # The half key stands for two keys, low and low + 1: few rows, or rows full of ties.
        low = low << 1
        again, within = _load(scores_ptr, count, ALIGN, BLOCK)
        keys = tl.where(again == again, _keys_of(again), NAN_KEY)
        keys = tl.where(within, keys, OUTSIDE)
        above = tl.sum((keys > low).to(tl.int32))
        upper = above >= k
        tie_key = tl.where(upper, low + 1, low)
        ties = k - tl.where(upper, count_high, above)
        keys = tl.reshape(keys, (rounds, LANES, 4))
        sure = (keys > tie_key).to(tl.int32)
        tie = (keys == tie_key).to(tl.int32)
        tied = ranks(tie, LANES)
        taken = ranks(sure, LANES) + tl.minimum(tied, ties)
        marks = sure | tl.where(tied < ties, tie, 0)
        write_chosen(row, taken, marks, 1, start, PAGE, COMPILED)


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
    LANES: tl.constexpr,
    COMPILED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program (t, s): the best k of columns s * piece ... of row t, into columns s * k ... of out.

    positions_ptr: what the columns stand for, themselves where None. best_ptr: where not None, the
    chosen scores. table_ptr: where not None, positions are written as cache slots. ALIGN divides
    the columns of a row, piece and score_stride. LANES: threads of the program. AHEAD: how many
    rows are at work at once, 0 where all are.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * piece
    seen = tl.maximum(tl.minimum(tl.load(visible_ptr + row), length), 0)
    count = _num_candidates(seen, first_piece, later_cuts, k) - start
    count = tl.maximum(tl.minimum(count, piece), 0)
    if COMPILED and AHEAD > 0:
        # The row that this multiprocessor will probably take next.
        later = row + AHEAD
        prefetch_row(scores_ptr + later * score_stride + start, later, count, BLOCK)
    scores_ptr += row * score_stride
    out_ptr += row * out_stride + tl.program_id(1) * k
    if positions_ptr is not None:
        positions_ptr += row * score_stride
    if best_ptr is not None:
        best_ptr += row * out_stride + tl.program_id(1) * k
    if table_ptr is not None:
        table_ptr += tl.load(request_ptr + row).to(tl.int64) * table_stride

    if count <= k:
        # All that are inside, and -1 behind them where nothing reads on.
        first = 0
        while first < k:
            places = first + tl.arange(0, LANES)
            inside = places < count
            found = position_of(
                positions_ptr, table_ptr, start + places, count - places, 1, PAGE, COMPILED
            )
            tl.store(out_ptr + places, tl.where(inside, found, -1), mask=places < k)
            if best_ptr is not None:
                scores = tl.load(scores_ptr + start + places, mask=inside, other=0.0)
                tl.store(best_ptr + places, scores, mask=inside)
            first += LANES
    else:
        pointers = (scores_ptr, positions_ptr, table_ptr, out_ptr, best_ptr)
        _choose(pointers, start, count, k, PAGE, ALIGN, BLOCK, LANES, COMPILED)
