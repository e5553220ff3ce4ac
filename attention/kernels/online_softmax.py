"""The online softmax that the attention kernels share, and the join of partial results.

A block of query rows keeps the largest score so far, the sum of weights and the weighted sum of
values (Milakov and Gimelshein, 2018; Rabe and Staats, 2021). Where the keys of a query are shared
out among programs, each leaves a partial result with its log-sum-exp, and `combine` joins them.

Values come in groups of columns, a tuple of tiles each: tiles of a whole row would not fit into the
registers while they are converted.
"""

import triton.language as tl
from torch import Tensor

from .launch import ceil_div, jit, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@jit
def weigh(scores, largest, total):
    """Weights of one more tile of scores (natural units, -inf where a key is not seen).

    largest: fp32 per query, in units of log2; total: fp32. Returns the weights, what earlier sums
    shrink by, and both states anew.
    """
    reached = tl.maximum(largest, tl.max(scores, 1) * LOG2E)
    # Nothing seen so far: any finite number will do instead of -inf - -inf.
    base = tl.where(reached == float("-inf"), 0.0, reached)
    weights = tl.exp2(scores * LOG2E - base[:, None])
    shrink = tl.exp2(largest - base)
    return weights, shrink, reached, total * shrink + tl.sum(weights, 1)


@jit
def add_values(weights, shrink, values, acc):
    """acc * shrink + weights @ values, group by group. weights: in the dtype of the values."""
    added = ()
    for g in tl.static_range(len(values)):  # pyright: ignore
        scaled = acc[g] * shrink[:, None]
        added = added + (tl.dot(weights, values[g], scaled, input_precision="ieee"),)
    return added


@jit
def dots(q, keys, scores):
    """scores + q @ keys^T, summed over the groups of columns, in the dtype of q."""
    for g in tl.static_range(len(q)):  # pyright: ignore
        keys_g = tl.trans(keys[g].to(q[g].dtype))
        scores = tl.dot(q[g], keys_g, scores, input_precision="ieee")
    return scores


@jit
def scores_of(q, keys, q_rope, rope, always, APART: tl.constexpr):
    """q @ keys^T + q_rope @ rope^T: fp32 [queries, keys]; the rotary part is a single group.

    APART: for blocks of 64 rows. Two warp groups share such a block, but where the compiler sees
    that a product feeds another one it lays out its rows over all warps, and as there are rows for
    one group only, both compute all the scores. Behind a branch it does not see that, and each
    group computes half of them. `always` is true, but known at run time only; the other branch must
    be no constant, or what follows the product is pulled into the branch.
    """
    q_rope_0, turned_rope = q_rope[0], tl.trans(rope[0].to(q_rope[0].dtype))
    if APART:
        # Transposed outside of the branch: inside, the tile would get a second buffer.
        turned = ()
        for g in tl.static_range(len(q)):  # pyright: ignore
            turned = turned + (tl.trans(keys[g]),)
        if always:
            scores = tl.dot(q_rope_0, turned_rope, input_precision="ieee")
        else:
            scores = tl.dot(q_rope_0, turned_rope, input_precision="ieee")
        for g in tl.static_range(len(q)):  # pyright: ignore
            if always:
                more = tl.dot(q[g], turned[g], input_precision="ieee")
            else:
                more = tl.dot(q_rope_0, turned_rope, input_precision="ieee")
            scores += more
    else:
        scores = tl.dot(q_rope_0, turned_rope, input_precision="ieee")
        scores = dots(q, keys, scores)
    return scores


@jit
def log_sum_exp(largest, total):
    """(natural log-sum-exp, what to divide by): -inf and 1 for a query that saw nothing."""
    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    return tl.where(seen, (largest + tl.log2(divisor)) * LN2, float("-inf")), divisor


@jit
def _join_parts(
    part_ptr,
    part_lse_ptr,
    first_ptr,
    out_ptr,
    lse_ptr,
    rows,
    parts,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    group = tl.program_id(0) // rows
    row = tl.program_id(0) % rows
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    if first_ptr is None:
        first = group * parts
        last = first + parts
    else:
        first = tl.load(first_ptr + group)
        last = tl.load(first_ptr + group + 1)
    largest = float("-inf")
    total = 0.0
    acc = tl.zeros((BLOCK_C,), tl.float32)
    for begin in range(first, last, BLOCK_P):
        p = begin + tl.arange(0, BLOCK_P)
        place = p.to(tl.int64) * rows + row
        lse = tl.load(part_lse_ptr + place, mask=p < last, other=float("-inf"))
        inside = (p < last)[:, None] & (c < C)[None, :]
        part = tl.load(part_ptr + place[:, None] * C + c[None, :], mask=inside, other=0.0)
        # An empty part was never written. It is read all the same: a load that waits for the
        # weights takes longer.
        part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
        reached = tl.maximum(largest, tl.max(lse, 0))
        base = tl.where(reached == float("-inf"), 0.0, reached)
        weights = tl.exp2((lse - base) * LOG2E)
        shrink = tl.exp2((largest - base) * LOG2E)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        largest = reached
    divisor = tl.where(total > 0.0, total, 1.0)
    place = group.to(tl.int64) * rows + row
    tl.store(out_ptr + place * C + c, (acc / divisor).to(out_ptr.dtype.element_ty), mask=c < C)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + place, largest + tl.log2(divisor) * LN2)


def combine(
    part_PRC: Tensor,
    part_lse_PR: Tensor,
    first_G: Tensor | int,
    out_GRC: Tensor,
    lse_GR: Tensor,
) -> None:
    """Join the parts first_G[g]..first_G[g + 1] - 1 of each group g into its rows, in place.

    part_PRC: fp32, attention of R rows over a part of their keys; part_lse_PR: fp32, natural,
    -inf where a row saw nothing (its part may hold anything then). first_G: int32, groups + 1 of
    them; or the number of parts that each group has.
    out_GRC: any float, lse_GR: fp32; both contiguous. A row that saw nothing in any part gets zeros
    and -inf.
    The twin is `reference.merge`. Floor: R * C * 4 bytes a part, from the L2 cache when they were
    just written.
    """
    groups, rows, width = out_GRC.shape
    first, parts = (None, first_G) if isinstance(first_G, int) else (first_G, 0)
    # Few parts are joined by few programs, many by many: what a thread adds up stays in registers.
    usual = max(1, ceil_div(len(part_PRC), groups))
    block, num_warps = (512, 4) if usual <= 4 else (128, 1 if usual <= 16 else 2)
    block = min(power_of_two(width), block)
    at_once = min(power_of_two(usual), 32)
    _join_parts[(groups * rows, ceil_div(width, block))](
        part_PRC, part_lse_PR, first, out_GRC, lse_GR, rows, parts, width, block, at_once,
        num_warps=num_warps,
    )  # fmt: skip
