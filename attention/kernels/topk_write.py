"""The chosen columns of a row, or the slots they stand for, as a list, ascending.

Marks of 32 neighbouring columns become the bits of a word. A scan over the words' numbers of bits
says where each word's columns go, and its thread writes them one after the other.
"""

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from .launch import jit
from .topk_search import keys_of, reaching, threshold_by_halves

# $1: a word, $2: the place of its first column, $3: the column of its lowest bit, $4: the list.
_LIST_BITS: tl.constexpr = tl.constexpr(
    """{
    .reg .pred p; .reg .b32 word, bit, place, column; .reg .b64 to;
    mov.b32 word, $1; mov.b32 place, $2;
    NEXT: setp.eq.b32 p, word, 0; @p bra DONE;
    neg.s32 bit, word; and.b32 bit, bit, word; xor.b32 word, word, bit;
    bfind.u32 column, bit; add.u32 column, column, $3;
    mad.wide.s32 to, place, 4, $4; st.global.b32 [to], column; add.s32 place, place, 1;
    bra NEXT;
    DONE: mov.b32 $0, 0; }"""
)


@dataclass(frozen=True)
class PagedSlots:
    """Turns positions into cache slots: table_BP int32 pages, request_T int32 row -> request."""

    table_BP: Tensor
    request_T: Tensor
    page_size: int


@jit
def words_of(pairs, step, memory, COMPILED: tl.constexpr):
    """int32 [columns / 32] with a bit for each column whose step is at least `step`.

    pairs: steps of a lane's four neighbouring columns, twice int32 [rounds, lanes]. memory: address
    of columns / 8 bytes of shared memory, through which each word comes to one thread.
    """
    rounds: tl.constexpr = pairs[0].shape[0]
    lanes: tl.constexpr = pairs[0].shape[1]
    words: tl.constexpr = rounds * lanes // 8
    first = reaching(pairs[0], step, COMPILED) & 0x20001
    second = reaching(pairs[1], step, COMPILED) & 0x80004
    bits = (first | (first >> 16) | second | (second >> 16)) & 15
    if COMPILED:
        bits = tl.reshape(bits, (rounds, lanes // 2, 2)) << (4 * tl.arange(0, 2)[None, None, :])
        bytes = tl.arange(0, rounds)[:, None] * (lanes // 2) + tl.arange(0, lanes // 2)[None, :]
        tl.inline_asm_elementwise(
            "st.shared.b8 [$1], $2; mov.b32 $0, 0;",
            "=r,r,r",
            [memory + bytes, tl.sum(bits, 2)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
        return tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];",
            "=r,r",
            [memory + 4 * tl.arange(0, words)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        bits = tl.reshape(bits, (rounds, lanes // 8, 8)) << (4 * tl.arange(0, 8)[None, None, :])
        return tl.reshape(tl.sum(bits, 2), (words,))


@jit
def _num_bits(words):
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24) & 0xFF


@jit
def list_bits(out_ptr, words, COMPILED: tl.constexpr):
    """Write the columns whose bits are set to out."""
    counts = _num_bits(words)
    places = tl.cumsum(counts, 0) - counts
    columns = 32 * tl.arange(0, words.numel)
    if COMPILED:
        tl.inline_asm_elementwise(
            _LIST_BITS,  # pyright: ignore
            "=r,r,r,r,l",
            [words, places, columns, out_ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for number in range(32):
            bit = (words >> number) & 1
            tl.store(out_ptr + places, columns + number, mask=bit == 1)
            places += bit


@jit
def store_some(pointers, values, taken, COMPILED: tl.constexpr):
    """Store the 32-bit values that are taken; compiled, by the threads that hold them."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointers.to(tl.int64), values, taken.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, values, mask=taken)


@jit
def load_some(pointers, taken, COMPILED: tl.constexpr):
    """int32 from where they are taken, 0 elsewhere; as `store_some`."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=&r,l,r",
            [pointers.to(tl.int64), taken.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(pointers, mask=taken, other=0)


@jit
def write(row, columns, places, taken, PAGE: tl.constexpr, COMPILED: tl.constexpr):
    """The taken columns, or the slots they stand for, to their places in out.

    row: pointers to its scores, its block table (None: columns are written) and its output.
    """
    _, table_ptr, out_ptr = row
    found = columns
    if table_ptr is not None:
        page = load_some(table_ptr + columns // PAGE, taken, COMPILED)
        found = page * PAGE + columns % PAGE
    store_some(out_ptr + places, found, taken, COMPILED)


@jit
def write_all(row, count, k, STEP: tl.constexpr, PAGE: tl.constexpr, COMPILED: tl.constexpr):
    """All columns, at most k, and -1 behind them."""
    _, _, out_ptr = row
    for first in range(0, k, STEP):
        places = first + tl.arange(0, STEP)
        write(row, places, places, places < count, PAGE, COMPILED)
        tl.store(out_ptr + places, -1, mask=(places >= count) & (places < k))


@jit
def write_exactly(row, count, k, STEP: tl.constexpr, PAGE: tl.constexpr, COMPILED: tl.constexpr):
    """The best k of more than k scores, whatever they are: slowly."""
    scores_ptr, _, _ = row
    last, ties = threshold_by_halves(scores_ptr, count, k, STEP)
    written = 0
    tied = 0
    for first in range(0, count, STEP):
        columns = first + tl.arange(0, STEP)
        inside = columns < count
        keys = keys_of(tl.load(scores_ptr + columns, mask=inside, other=0.0))
        is_tie = (inside & (keys == last)).to(tl.int32)
        before = tied + tl.cumsum(is_tie, 0) - is_tie
        taken = inside & ((keys > last) | ((keys == last) & (before < ties)))
        places = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        write(row, columns, places, taken, PAGE, COMPILED)
        written += tl.sum(taken.to(tl.int32))
        tied += tl.sum(is_tie)


@jit
def prefetch_row(scores_ptr, count, BLOCK: tl.constexpr):
    """Ask for a row that is going to be read."""
    lines = tl.minimum(tl.arange(0, BLOCK // 32) * 32, tl.maximum(count - 1, 0))
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l",
        [(scores_ptr + lines).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
