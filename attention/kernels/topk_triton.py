"""Exact top-k of index scores on a GPU: the best k positions of each row, by ascending position.

The order is that of `topk.top_k`: the higher score first, at equal scores the lower position, NaN
behind everything. The scores' distribution decides how long a row takes, not what is chosen.

A program reads a row, or a piece of one, once, and counts how many scores fall into each of 2047
steps around the k-th best (`topk_search.py`); it keeps every score's step in registers. Columns
whose step is high enough become bits, and bits a list (`topk_write.py`). Of the columns on the
threshold's own step, seldom more than two or three, the worst are dropped one by one; a row with
many equals there takes a longer way.

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
from .topk_search import (
    keys_of,
    likely_range,
    new_counters,
    step_of_threshold,
    steps_of_row,
    threshold_by_halves,
)
from .topk_write import list_bits, prefetch_row, words_of

K_MAX = 2048
BLOCK_MAX: tl.constexpr = tl.constexpr(32768)
KEYS_OF_A_WARP = 2048
# Rows to have before the first cut of long ones makes the longest pieces.
MANY_PIECES = 64
# Programs that share a multiprocessor: some compute while others wait for memory.
PROGRAMS = 2
# What lets two programs of 512 threads share one.
REGISTERS = 64
# As many columns may share the threshold's step.
FEW: tl.constexpr = tl.constexpr(64)
# Above what orders any score.
DROPPED: tl.constexpr = tl.constexpr(2**63 - 1)


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
    sizes = (columns, piece, scores_TL.stride(0), scores_TL.data_ptr() // 4)
    aligned = not any(size % 4 for size in sizes)
    places, best = out
    pieces = ceil_div(max(columns, 1), piece)
    rest_PX = torch.empty(rows * pieces, FEW.value, dtype=torch.int32, device=places.device)
    compiled = takes_assembly(scores_TL.device)
    at_once = PROGRAMS * multiprocessors(scores_TL.device)
    _select[(rows, pieces)](
        scores_TL,
        source.positions_TL,
        visible_T,
        places,
        best,
        slots.table_BP if slots else None,
        slots.request_T if slots else None,
        rest_PX,
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
        **({"maxnreg": REGISTERS} if compiled else {}),
    )


def takes_assembly(device: torch.device) -> bool:
    """Whether kernels for it may hold PTX: not in the interpreter, not on AMD's GPUs."""
    return device.type == "cuda" and torch.version.cuda is not None


@jit
def _write(row, columns, places, taken, PAGE: tl.constexpr):
    """What the taken columns stand for, and their scores, to their places."""
    scores_ptr, positions_ptr, table_ptr, out_ptr, best_ptr = row
    found = columns
    if positions_ptr is not None:
        found = tl.load(positions_ptr + found, mask=taken, other=0)
    if table_ptr is not None:
        page = tl.load(table_ptr + found // PAGE, mask=taken, other=0)
        found = page * PAGE + found % PAGE
    tl.store(out_ptr + places, found, mask=taken)
    if best_ptr is not None:
        scores = tl.load(scores_ptr + columns, mask=taken, other=0.0)
        tl.store(best_ptr + places, scores, mask=taken)


@jit
def _write_list(row, k, STEP: tl.constexpr, PAGE: tl.constexpr):
    """Turn the k columns in out into what they stand for, and add their scores."""
    _, positions_ptr, table_ptr, out_ptr, best_ptr = row
    if positions_ptr is not None or table_ptr is not None or best_ptr is not None:
        tl.debug_barrier()
        for first in range(0, k, STEP):
            numbers = first + tl.arange(0, STEP)
            columns = tl.load(out_ptr + numbers, mask=numbers < k, other=0)
            _write(row, columns, numbers, numbers < k, PAGE)


@jit
def _without_worst(words, scores_ptr, rest_ptr, equals, ties, excess, COMPILED: tl.constexpr):
    """Clear the bits of the `excess` worst of the `ties` columns that `equals` marks."""
    list_bits(rest_ptr, equals, 0, COMPILED)
    tl.debug_barrier()
    numbers = tl.arange(0, FEW)
    inside = numbers < ties
    columns = tl.load(rest_ptr + numbers, mask=inside, other=0)
    keys = keys_of(tl.load(scores_ptr + columns, mask=inside, other=0.0))
    order = tl.where(inside, (keys.to(tl.int64) << 32) - columns, DROPPED)
    for _ in range(excess):
        worst = tl.min(order)
        order = tl.where(order == worst, DROPPED, order)
        column = (-worst).to(tl.int32)
        is_word = tl.arange(0, words.numel) == column >> 5
        words = tl.where(is_word, words & ~(1 << (column & 31)), words)
    return words


@jit
def _write_exactly(row, start, count, k, STEP: tl.constexpr, PAGE: tl.constexpr):
    """Write the best k of more than k scores, whatever they are: slowly."""
    scores_ptr = row[0] + start
    last, ties = threshold_by_halves(scores_ptr, count, k, STEP)
    columns = tl.arange(0, STEP)
    written = 0
    tied = 0
    for first in range(0, count, STEP):
        inside = first + columns < count
        scores = tl.load(scores_ptr + first + columns, mask=inside, other=0.0)
        keys = keys_of(scores)
        is_tie = (inside & (keys == last)).to(tl.int32)
        before = tied + tl.cumsum(is_tie, 0) - is_tie
        taken = inside & ((keys > last) | ((keys == last) & (before < ties)))
        places = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        _write(row, start + first + columns, places, taken, PAGE)
        written += tl.sum(taken.to(tl.int32))
        tied += tl.sum(is_tie)


@jit
def _write_all(row, start, count, k, STEP: tl.constexpr, PAGE: tl.constexpr):
    """All that are inside, and -1 behind them where nothing reads on."""
    out_ptr = row[3]
    for first in range(0, k, STEP):
        places = first + tl.arange(0, STEP)
        _write(row, start + places, places, places < count, PAGE)
        tl.store(out_ptr + places, -1, mask=(places >= count) & (places < k))


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
    rest_ptr,
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
    chosen scores. table_ptr: where not None, positions are written as cache slots. rest_ptr: room
    for FEW numbers a program. ALIGN divides the columns of a row, piece and score_stride. LANES:
    threads of the program. AHEAD: how many rows are at work at once, 0 where all are.
    """
    width: tl.constexpr = min(4 * LANES, BLOCK)  # pyright: ignore
    t = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    start = s * piece
    seen = tl.maximum(tl.minimum(tl.load(visible_ptr + t), length), 0)
    count = _num_candidates(seen, first_piece, later_cuts, k) - start
    count = tl.maximum(tl.minimum(count, piece), 0)
    if COMPILED and AHEAD > 0:
        # The row that this multiprocessor will probably take next.
        later = t + AHEAD
        if later < tl.num_programs(0):
            prefetch_row(scores_ptr + later * score_stride + start, count, BLOCK)
    # So that the compiler knows what ALIGN divides.
    score_stride = score_stride // ALIGN * ALIGN
    start = start // ALIGN * ALIGN
    scores_ptr += t * score_stride
    out_ptr += t * out_stride + s * k
    rest_ptr += (t * tl.num_programs(1) + s) * FEW
    if positions_ptr is not None:
        positions_ptr += t * score_stride
    if best_ptr is not None:
        best_ptr += t * out_stride + s * k
    if table_ptr is not None:
        table_ptr += tl.load(request_ptr + t).to(tl.int64) * table_stride
    row = (scores_ptr, positions_ptr, table_ptr, out_ptr, best_ptr)
    if count <= k:
        _write_all(row, start, count, k, width, PAGE)
    else:
        if COMPILED and AHEAD == 0:
            prefetch_row(scores_ptr + start, count, BLOCK)
        counters = new_counters(count, COMPILED)
        scaling = likely_range(scores_ptr + start, count, k, counters, 2 * LANES, COMPILED)
        pairs = steps_of_row(
            scores_ptr + start, count, scaling, counters, ALIGN, BLOCK, LANES, COMPILED
        )
        step, above, reach = step_of_threshold(pairs, k, counters, COMPILED)
        if (step == 0) | (reach - above > FEW):
            _write_exactly(row, start, count, k, width, PAGE)
        else:
            words = words_of(pairs, step, counters, COMPILED)
            if reach > k:
                better = words_of(pairs, step + 1, counters + BLOCK // 8, COMPILED)
                equals = words & ~better
                words = _without_worst(
                    words, scores_ptr + start, rest_ptr, equals, reach - above, reach - k, COMPILED
                )
            list_bits(out_ptr, words, start, COMPILED)
            _write_list(row, k, width, PAGE)
