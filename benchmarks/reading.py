"""What reading the rows of sparse attention takes alone: what no kernel over the same slots beats.

A floor counts bytes at the rate of a long copy. Rows picked one by one come at less, and how much
less depends on how many are under way; so this reads them in several ways, without using them.
"""

from collections.abc import Callable, Iterator

import torch
import triton.language as tl
from torch import Tensor

from benchmarks.kernel_cases import Entry
from minidsa.attention.kernels.launch import jit

# Parts of a list, rows at once, stages of loads: the quickest of six for 64 requests with fp8 rows,
# with bf16 rows, and for 8 requests (H200).
WAYS = ((8, 32, 1), (4, 16, 4), (16, 16, 3))


@jit
def _read(
    words_ptr, slots_ptr, sums_ptr, stride, columns,
    WORDS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program p folds its part of a list into one word, so that no load can be left out."""
    part = tl.program_id(0) % PARTS
    own = columns // PARTS
    slots_ptr += tl.program_id(0) // PARTS * columns + part * own
    word = tl.arange(0, WIDTH)[None, :]
    folded = tl.zeros((ROWS, WIDTH), tl.int32)
    for first in tl.range(0, own, ROWS, num_stages=STAGES):
        slot = tl.load(slots_ptr + first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        folded ^= tl.load(words_ptr + slot * stride + word, mask=word < WORDS, other=0)
    tl.store(sums_ptr + tl.program_id(0), tl.xor_sum(tl.xor_sum(folded, 1), 0))


def reading(rows_SX: Tensor, slots_TK: Tensor) -> Iterator[Entry]:
    """One entry for each way; rows_SX: dense, whole words of 4 bytes. slots_TK: none below 0."""
    words_SW = rows_SX.view(torch.int32)
    tokens, columns = slots_TK.shape
    width = words_SW.shape[1]
    for parts, rows, stages in WAYS:
        sums_P = torch.empty(tokens * parts, dtype=torch.int32, device=rows_SX.device)

        def run(parts=parts, rows=rows, stages=stages, sums_P=sums_P) -> Tensor:
            _read[(len(sums_P),)](
                words_SW, slots_TK, sums_P, words_SW.stride(0), columns,
                WORDS=width, WIDTH=1 << (width - 1).bit_length(), PARTS=parts, ROWS=rows,
                STAGES=stages, num_warps=4,
            )  # fmt: skip
            return sums_P

        yield Entry(
            f"minidsa, reading alone {parts}x{rows}", run, _checking(run, words_SW, slots_TK)
        )


def _checking(run: Callable[[], Tensor], words_SW: Tensor, slots_TK: Tensor) -> Callable[[], str]:
    """Whether all parts together are what the first list's words fold to."""

    def check() -> str:
        sums_P = run()
        found = _fold(sums_P[: len(sums_P) // len(slots_TK)])
        return "ok" if found == _fold(words_SW[slots_TK[0].long()].flatten()) else "wrong words"

    return check


def _fold(words: Tensor) -> int:
    folded = 0
    for bit in range(32):
        folded |= (int((words >> bit & 1).sum()) & 1) << bit
    return folded
