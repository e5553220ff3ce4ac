"""Exact top-k of index scores on a GPU: the best k positions of each row, by ascending position.

The order is that of `topk.top_k`: the higher score first, at equal scores the lower position, NaN
behind everything. The scores' distribution decides how long a row takes, not what is chosen.

A program reads a row once, and counts how many scores fall into each of 2047 steps around the k-th
best (`topk_search.py`); it keeps every score's step in registers. Columns whose step is high enough
become bits, and bits a list (`topk_write.py`). Of the columns on the threshold's own step, seldom
more than two or three, the worst are dropped one by one; a row with many equals there takes a
longer way.

Rows longer than BLOCK_MAX are shared out among programs (`topk_parts.py`).

Floor: 4 bytes read per score and 4 k written a row: 128 rows of 32k take 4.1 us at 4.2 TB/s.
"""

import torch
import triton.language as tl
from torch import Tensor

from .launch import jit, multiprocessors, power_of_two
from .topk_parts import aligned, select_by_parts
from .topk_search import (
    DROPPED,
    FEW,
    keys_of,
    likely_range,
    new_counters,
    single_steps,
    step_of_threshold,
    steps_of_row,
)
from .topk_write import (
    PagedSlots,
    list_bits,
    prefetch_row,
    words_of,
    write,
    write_all,
    write_exactly,
)

K_MAX = 2048
BLOCK_MAX: tl.constexpr = tl.constexpr(32768)
KEYS_OF_A_WARP = 2048
# Programs that share a multiprocessor: some compute while others wait for memory.
PROGRAMS = 2
# What lets two programs of 512 threads share one.
REGISTERS = 64


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
    if length > BLOCK_MAX.value:
        select_by_parts(scores_TL, visible_T, out, slots, takes_assembly(out.device))
    else:
        _launch(scores_TL, visible_T, out, slots)
    return out


def _launch(scores_TL: Tensor, visible_T: Tensor, out: Tensor, slots: PagedSlots | None) -> None:
    rows, length = scores_TL.shape
    block = max(power_of_two(max(length, 1)), 1024)
    num_warps = max(4, block // KEYS_OF_A_WARP)
    rest_TX = torch.empty(rows, FEW.value, dtype=torch.int32, device=out.device)
    compiled = takes_assembly(out.device)
    at_once = PROGRAMS * multiprocessors(out.device)
    _select[(rows,)](
        scores_TL,
        visible_T,
        slots.table_BP if slots else None,
        slots.request_T if slots else None,
        out,
        rest_TX,
        scores_TL.stride(0),
        slots.table_BP.stride(0) if slots else 0,
        out.stride(0),
        length,
        out.shape[1],
        PAGE=slots.page_size if slots else 1,
        ALIGN=4 if aligned(scores_TL) else 1,
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
def _as_slots(row, k, STEP: tl.constexpr, PAGE: tl.constexpr, COMPILED: tl.constexpr):
    """Turn the k columns in out into slots."""
    _, table_ptr, out_ptr = row
    if table_ptr is not None:
        tl.debug_barrier()
        for first in range(0, k, STEP):
            numbers = first + tl.arange(0, STEP)
            columns = tl.load(out_ptr + numbers, mask=numbers < k, other=0)
            write(row, columns, numbers, numbers < k, PAGE, COMPILED)


@jit
def _without_worst(words, scores_ptr, rest_ptr, equals, ties, excess, COMPILED: tl.constexpr):
    """Clear the bits of the `excess` worst of the `ties` columns that `equals` marks."""
    list_bits(rest_ptr, equals, COMPILED)
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
def _select(
    scores_ptr,
    visible_ptr,
    table_ptr,
    request_ptr,
    out_ptr,
    rest_ptr,
    score_stride,
    table_stride,
    out_stride,
    length,
    k,
    PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    COMPILED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program t: the best k of row t, of at most BLOCK columns, into row t of out.

    table_ptr: where not None, positions are written as cache slots. rest_ptr: room for FEW numbers
    a program. ALIGN divides the columns of a row and score_stride. LANES: threads of the program.
    AHEAD: how many rows are at work at once, 0 where all are.
    """
    width: tl.constexpr = min(4 * LANES, BLOCK)  # pyright: ignore
    t = tl.program_id(0).to(tl.int64)
    count = tl.maximum(tl.minimum(tl.load(visible_ptr + t), length), 0)
    if COMPILED and AHEAD > 0:
        # The row that this multiprocessor will probably take next.
        later = t + AHEAD
        if later < tl.num_programs(0):
            prefetch_row(scores_ptr + later * score_stride, count, BLOCK)
    # So that the compiler knows what ALIGN divides.
    scores_ptr += t * (score_stride // ALIGN * ALIGN)
    out_ptr += t * out_stride
    rest_ptr += t * FEW
    if table_ptr is not None:
        table_ptr += tl.load(request_ptr + t).to(tl.int64) * table_stride
    row = (scores_ptr, table_ptr, out_ptr)
    if count <= k:
        write_all(row, count, k, width, PAGE, COMPILED)
    else:
        if COMPILED and AHEAD == 0:
            prefetch_row(scores_ptr, count, BLOCK)
        counters = new_counters(count, COMPILED)
        scaling = likely_range(scores_ptr, count, k, counters, 2 * LANES, COMPILED)
        pairs = steps_of_row(scores_ptr, count, scaling, counters, ALIGN, BLOCK, LANES, COMPILED)
        steps = None
        if not COMPILED:
            steps = single_steps(pairs)
        step, above, reach = step_of_threshold(steps, k, counters, COMPILED)
        if (step == 0) | (reach - above > FEW):
            write_exactly(row, count, k, width, PAGE, COMPILED)
        else:
            words = words_of(pairs, step, counters, COMPILED)
            if reach > k:
                better = words_of(pairs, step + 1, counters + BLOCK // 8, COMPILED)
                equals = words & ~better
                words = _without_worst(
                    words, scores_ptr, rest_ptr, equals, reach - above, reach - k, COMPILED
                )
            list_bits(out_ptr, words, COMPILED)
            _as_slots(row, k, width, PAGE, COMPILED)
