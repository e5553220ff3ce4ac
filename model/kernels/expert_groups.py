"""Token-expert pairs in the order of their experts, the tiles of each expert, and a token's sum.

Pairs of one expert keep their order. Few pairs are compared with each other in one launch, many are
sorted by torch. The twin is a stable argsort.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ...attention.kernels.launch import ceil_div, jit, power_of_two

# Ranking takes the square of the pairs; a sort beyond so many.
MOST_RANKED = 4096


@dataclass(frozen=True)
class Groups:
    """Pairs in the order of their experts, cut into tiles of one expert.

    order_P: int32, the pair at each place. tiles_N3: int32, for each tile its expert, its first
    place and the place behind its last; expert -1 where there is no tile.
    """

    order_P: Tensor
    tiles_N3: Tensor
    tile_rows: int


@jit
def _rank(ids_ptr, order_ptr, ends_ptr, pairs, experts, pair_programs, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if program < pair_programs:
        # Equal experts keep their order: pairs before this one count, those behind do not.
        p = program * BLOCK + lane
        own = tl.load(ids_ptr + p, mask=p < pairs, other=0).to(tl.int32)
        rank = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, pairs, BLOCK):
            q = begin + lane
            other = tl.load(ids_ptr + q, mask=q < pairs, other=experts).to(tl.int32)
            earlier = (other[None, :] == own[:, None]) & (q[None, :] < p[:, None])
            rank += tl.sum(((other[None, :] < own[:, None]) | earlier).to(tl.int32), 1)
        tl.store(order_ptr + rank, p, mask=p < pairs)
    else:
        x = (program - pair_programs) * BLOCK + lane
        count = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, pairs, BLOCK):
            q = begin + lane
            other = tl.load(ids_ptr + q, mask=q < pairs, other=experts).to(tl.int32)
            count += tl.sum((other[None, :] <= x[:, None]).to(tl.int32), 1)
        tl.store(ends_ptr + x, count, mask=x < experts)


@jit
def _cut(ends_ptr, tiles_ptr, experts, num_tiles, ROWS: tl.constexpr, BLOCK_X: tl.constexpr):
    x = tl.arange(0, BLOCK_X)
    end = tl.load(ends_ptr + x, mask=x < experts, other=0)
    start = tl.load(ends_ptr + x - 1, mask=(x > 0) & (x < experts), other=0)
    own = tl.where(x < experts, (end - start + ROWS - 1) // ROWS, 0)
    first = tl.cumsum(own, 0) - own
    for i in range(tl.max(own, 0)):
        place = tiles_ptr + (first + i) * 3
        tl.store(place, x, mask=i < own)
        tl.store(place + 1, start + i * ROWS, mask=i < own)
        tl.store(place + 2, tl.minimum(end, start + (i + 1) * ROWS), mask=i < own)
    used = tl.sum(own, 0)
    for begin in range(used, num_tiles, BLOCK_X):
        tile = begin + x
        tl.store(tiles_ptr + tile * 3, -1, mask=tile < num_tiles)


def group_pairs(ids_TK: Tensor, num_experts: int, tile_rows: int) -> Groups:
    """Sort the pairs by expert, earlier ones first, and cut each expert's into tiles.

    ids_TK: integers below num_experts, contiguous.
    """
    pairs, device = ids_TK.numel(), ids_TK.device
    order_P, ends_X = (_rank_pairs if pairs <= MOST_RANKED else _sort_pairs)(ids_TK, num_experts)
    # Each expert wastes less than one tile.
    num_tiles = pairs // tile_rows + min(pairs, num_experts)
    tiles_N3 = torch.empty(num_tiles, 3, dtype=torch.int32, device=device)
    _cut[(1,)](ends_X, tiles_N3, num_experts, num_tiles, tile_rows, power_of_two(num_experts))
    return Groups(order_P, tiles_N3, tile_rows)


def _rank_pairs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The pairs in order, and behind which place those of each expert end; int32."""
    pairs, device, block = ids_TK.numel(), ids_TK.device, 64
    order_P = torch.empty(pairs, dtype=torch.int32, device=device)
    ends_X = torch.empty(num_experts, dtype=torch.int32, device=device)
    programs = ceil_div(pairs, block)
    _rank[(programs + ceil_div(num_experts, block),)](
        ids_TK, order_P, ends_X, pairs, num_experts, programs, block
    )
    return order_P, ends_X


def _sort_pairs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    sorted_P, order_P = torch.sort(ids_TK.flatten().int(), stable=True)
    experts_X = torch.arange(num_experts, dtype=torch.int32, device=ids_TK.device)
    ends_X = torch.searchsorted(sorted_P, experts_X, right=True, out_int32=True)
    return order_P.int(), ends_X


@jit
def _combine(pairs_ptr, weights_ptr, out_ptr, chosen, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in range(chosen):
        weight = tl.load(weights_ptr + token * chosen + k)
        row = tl.load(pairs_ptr + (token * chosen + k) * width + c, mask=c < width, other=0.0)
        acc += weight * row.to(tl.float32)
    tl.store(out_ptr + token * width + c, acc.to(out_ptr.dtype.element_ty), mask=c < width)


def combine_pairs(pairs_PD: Tensor, weights_TK: Tensor, out_TD: Tensor) -> Tensor:
    """The weighted sum of each token's pairs, in the order of its choice, into out_TD.

    pairs_PD: P = T * K, the pairs of a token side by side. weights_TK: fp32. All contiguous.
    """
    (tokens, width), chosen = out_TD.shape, weights_TK.shape[1]
    block = min(power_of_two(width), 1024)
    _combine[(tokens, ceil_div(width, block))](pairs_PD, weights_TK, out_TD, chosen, width, block)
    return out_TD
