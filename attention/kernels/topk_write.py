"""Where the chosen elements of a row go: ranks, and writes that leave them in their threads.

The compiled parts count on the layout of a wide load: a thread has four neighbouring elements in
each of `rounds` rounds, in which the lanes of the program follow one another.
"""

import triton.language as tl

from .launch import jit


@jit
def ranks(marks, LANES: tl.constexpr):
    """How many ones are before each element of `marks`, [rounds, LANES, 4] of zeros and ones.

    A thread has four neighbours in each round. What 32 threads have of a round, at most 128, takes
    8 bits: one scan within a warp does for 8 rounds, and a small one over all warps' totals.
    """
    some: tl.constexpr = min(marks.shape[0], 8)  # pyright: ignore
    groups: tl.constexpr = marks.shape[0] // some
    warps: tl.constexpr = LANES // 32
    counts = tl.reshape(tl.sum(marks, 2), (groups, some, warps, 32)).to(tl.int64)
    shift = (8 * tl.arange(0, some)).to(tl.int64)
    packed = tl.sum(counts << shift[None, :, None, None], 1)
    totals = (tl.sum(packed, 2)[:, None, :] >> shift[None, :, None]) & 0xFF
    flat = tl.reshape(totals.to(tl.int32), (groups * some * warps,))
    base = tl.reshape(tl.cumsum(flat, 0) - flat, (groups, some, warps))
    within = (tl.cumsum(packed, 2) - packed)[:, None, :, :] >> shift[None, :, None, None]
    before = (within & 0xFF).to(tl.int32) + base[:, :, :, None]
    before = tl.reshape(before, (groups * some, LANES))
    return before[:, :, None] + (tl.cumsum(marks, 2) - marks)


@jit
def _gather(pointers, keys, least, COMPILED: tl.constexpr):
    """tl.load of 32-bit numbers where keys >= least, else 0; as `_store`, nothing is moved."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=&r,l,r,r",
            [pointers.to(tl.int64), keys, least],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        values = tl.load(pointers, mask=keys >= least, other=0)
        return values.to(tl.int32, bitcast=True)


@jit
def _store(pointers, values, keys, least, COMPILED: tl.constexpr):
    """tl.store of 32-bit numbers where keys >= least, but elements stay in their threads: tl.store
    would move all so that neighbours are neighbours in memory, which the few chosen are not."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.s32 p, $3, $4; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r,r",
            [pointers.to(tl.int64), values, keys, least],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        values = values.to(pointers.dtype.element_ty, bitcast=True)
        tl.store(pointers, values, mask=keys >= least)


@jit
def position_of(
    positions_ptr, table_ptr, columns, keys, least, PAGE: tl.constexpr, COMPILED: tl.constexpr
):
    """What is written for columns with keys >= least: positions in the row, or their slots.

    positions_ptr: where not None, what the columns stand for. table_ptr: the request's pages.
    """
    position = columns
    if positions_ptr is not None:
        position = _gather(positions_ptr + columns, keys, least, COMPILED)
    if table_ptr is not None:
        page = _gather(table_ptr + position // PAGE, keys, least, COMPILED)
        position = page * PAGE + position % PAGE
    return position


@jit
def write_chosen(row, places, keys, least, start, PAGE: tl.constexpr, COMPILED: tl.constexpr):
    """The columns with keys of at least `least` to their places; both [rounds, lanes, 4]."""
    scores_ptr, positions_ptr, table_ptr, out_ptr, best_ptr = row
    rounds: tl.constexpr = keys.shape[0]
    lanes: tl.constexpr = keys.shape[1]
    columns = tl.arange(0, rounds)[:, None, None] * (4 * lanes) + start
    columns += tl.arange(0, lanes)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    found = position_of(positions_ptr, table_ptr, columns, keys, least, PAGE, COMPILED)
    _store(out_ptr + places, found, keys, least, COMPILED)
    if best_ptr is not None:
        best = _gather(scores_ptr + columns, keys, least, COMPILED)
        _store(best_ptr + places, best, keys, least, COMPILED)


@jit
def prefetch_row(scores_ptr, row, count, BLOCK: tl.constexpr):
    """Ask for the row that this multiprocessor will probably take next, while it computes."""
    if row < tl.num_programs(0):
        lines = tl.minimum(tl.arange(0, BLOCK // 32) * 32, tl.maximum(count - 1, 0))
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l",
            [(scores_ptr + lines).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
