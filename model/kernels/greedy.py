"""The likeliest token of each row of logits, and whether all of them are finite.

    token[n] = the lowest v with logits[n, v] = max logits[n], or -1 where any is NaN or infinite

A row is cut into parts, so that one row fills the GPU; the best of the parts is found by a second
launch. Reads nothing past the rows. Called by `layers.embedding` on a GPU; the twin is what it does
on a CPU.

Floor: bytes, 2 * V a row at 4.3 TB/s on one H200; for few rows two launches.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...attention.kernels.launch import ceil_div, jit, power_of_two

# Logits that one program looks at.
PART = 4096


@jit
def _best_of_parts(logits_ptr, best_ptr, token_ptr, vocab, stride, num_parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = part * PART + tl.arange(0, PART)
    inside = v < vocab
    logits = tl.load(logits_ptr + row * stride + v, mask=inside, other=0.0).to(tl.float32)
    wrong = tl.max(((logits != logits) | (tl.abs(logits) == float("inf"))).to(tl.int32), 0)
    logits = tl.where(inside & (logits == logits), logits, float("-inf"))
    place = row * num_parts + part
    # What is wrong wins, and is no token.
    tl.store(best_ptr + place, tl.where(wrong > 0, float("inf"), tl.max(logits, 0)))
    tl.store(token_ptr + place, tl.where(wrong > 0, -1, part * PART + tl.argmax(logits, 0)))


@jit
def _best_part(best_ptr, token_ptr, out_ptr, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    place, inside = row * num_parts + part, part < num_parts
    best = tl.load(best_ptr + place, mask=inside, other=float("-inf"))
    token = tl.load(token_ptr + place, mask=inside, other=0)
    winner = tl.sum(tl.where(part == tl.argmax(best, 0), token, 0), 0)
    tl.store(out_ptr + row, winner.to(tl.int64))


def greedy_tokens(logits_NV: Tensor) -> Tensor:
    """Tokens, int64 [N]; logits in any float dtype, rows dense."""
    rows, vocab = logits_NV.shape
    out_N = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    if rows:
        parts = ceil_div(vocab, PART)
        best = torch.empty(rows, parts, dtype=torch.float32, device=logits_NV.device)
        token = torch.empty(rows, parts, dtype=torch.int32, device=logits_NV.device)
        stride = logits_NV.stride(0)
        _best_of_parts[(rows, parts)](
            logits_NV, best, token, vocab, stride, parts, PART, num_warps=4
        )
        _best_part[(rows,)](best, token, out_N, parts, power_of_two(parts), num_warps=1)
    return out_N
