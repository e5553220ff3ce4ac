"""DeepSeek-V3's gate: products with fp32 weights, and the choice of experts in one launch.

    s = sigmoid(x W^T);  ranking = s + bias, -inf outside the best groups;  the K best of it, with
    weights scale * s / sum of the chosen s

- `fp32_product`: rows of any dtype times fp32 weights. Few rows leave most of the chip idle, so
  the columns are cut into parts; whoever reads the sums adds the parts in order. The weight
  is split into three bf16 numbers, which together are exact; beside rows of another dtype both
  operands are split into tf32 numbers. The error stays near that of fp32.
- `choose_experts`: one program a token. A group counts by the sum of its two best; equal scores
  keep the lower index. Scores of NaN choose some experts, and their weights are NaN.

Reads past the mask: nothing. Called by `layers.moe` and `layers.mla` on a GPU; the twin is `Gate`
on a CPU.

Floor on one H200: 4 * E * D bytes of weights at 4.3 TB/s (1.7 us for V3.2's gate), and a launch.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...attention.kernels.launch import ceil_div, jit, multiprocessors, power_of_two
from ..config import MoeConfig

# Columns of one turn of the product's loop.
STEP = 64
# From here on larger tiles of tokens are faster.
MANY_TOKENS = 4096


@jit
def _fp32_product(
    x_ptr,
    w_ptr,
    out_ptr,
    tokens,
    rows,
    columns,
    x_stride,
    per_part,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    is_token, is_row = (t < tokens)[None, :], (e < rows)[:, None]
    x_pointers = x_ptr + t.to(tl.int64)[None, :] * x_stride
    w_pointers = w_ptr + e.to(tl.int64)[:, None] * columns
    acc = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    last = tl.minimum((part + 1) * per_part, columns)
    for first in tl.range(part * per_part, last, STEP, num_stages=STAGES):
        d = first + tl.arange(0, STEP)
        inside = d < last
        x = tl.load(x_pointers + d[:, None], mask=is_token & inside[:, None], other=0.0)
        w = tl.load(w_pointers + d[None, :], mask=is_row & inside[None, :], other=0.0)
        if x.dtype == tl.bfloat16:
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            # A sum of its own: tensor cores cut off what they add to a long one.
            product = tl.dot(middle, x, tl.dot(low, x))
            acc += tl.dot(high, x, product)
        else:
            acc = tl.dot(w, x.to(tl.float32), acc, input_precision="tf32x3")
    place = (part.to(tl.int64) * tokens + t[None, :]) * rows + e[:, None]
    tl.store(out_ptr + place, acc, mask=is_token & is_row)


def fp32_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Parts [S, T, E] in fp32, whose sum over S is x times the transpose of the weight.

    x_TD: any float dtype, rows dense. weight_ED: fp32, contiguous.
    """
    (tokens, columns), rows = x_TD.shape, len(weight_ED)
    most = 128 if x_TD.dtype == torch.bfloat16 and tokens >= MANY_TOKENS else 64
    block_t = min(most, max(16, power_of_two(max(1, tokens))))
    block_e = min(64, max(16, power_of_two(rows)))
    tiles = ceil_div(max(1, tokens), block_t) * ceil_div(rows, block_e)
    wanted = max(1, multiprocessors(x_TD.device) // tiles)
    per_part = ceil_div(ceil_div(columns, wanted), STEP) * STEP
    parts = ceil_div(columns, per_part)
    out_STE = torch.empty(parts, tokens, rows, dtype=torch.float32, device=x_TD.device)
    if tokens:
        _fp32_product[(ceil_div(tokens, block_t), ceil_div(rows, block_e), parts)](
            x_TD,
            weight_ED,
            out_STE,
            tokens,
            rows,
            columns,
            x_TD.stride(0),
            per_part,
            block_t,
            block_e,
            STEP,
            3,
            num_warps=4,
        )
    return out_STE


@jit
def _choose_experts(
    parts_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    tokens,
    num_parts,
    experts,
    per_group,
    num_shared,
    scale,
    AT_ONCE: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    within = tl.arange(0, BLOCK_E)[None, :]
    expert = group * per_group + within
    real = (group < NUM_GROUPS) & (within < per_group)
    logits = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    for first in range(0, num_parts, AT_ONCE):
        # Unrolled, so that several parts are on their way at once.
        for i in tl.static_range(AT_ONCE):
            place = ((first + i) * tokens + token) * experts + expert
            read = real & (first + i < num_parts)
            logits += tl.load(parts_ptr + place, mask=read, other=0.0)
    scores = tl.sigmoid(logits)
    ranking = scores + tl.load(bias_ptr + expert, mask=real, other=0.0)
    # What is no number must not decide where memory is read.
    ranking = tl.where(real & (ranking == ranking), ranking, float("-inf"))
    if CHOSEN_GROUPS < NUM_GROUPS:
        best = tl.max(ranking, 1)
        second = tl.where(within == tl.argmax(ranking, 1)[:, None], float("-inf"), ranking)
        # Not below any other number, and not -inf where that marks who was chosen.
        sums = tl.maximum(best + tl.max(second, 1), -1e30)
        lane = tl.arange(0, BLOCK_G)
        sums = tl.where(lane < NUM_GROUPS, sums, float("-inf"))
        kept = lane < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            winner = lane == tl.argmax(sums, 0)
            kept = kept | winner
            sums = tl.where(winner, float("-inf"), sums)
        ranking = tl.where(kept[:, None], ranking, float("-inf"))
    flat = tl.reshape(ranking, (BLOCK_G * BLOCK_E,))
    flat_scores = tl.reshape(scores, (BLOCK_G * BLOCK_E,))
    lane = tl.arange(0, BLOCK_G * BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(K):
        place = tl.argmax(flat, 0)
        winner = lane == place
        score = tl.sum(tl.where(winner, flat_scores, 0.0), 0)
        chosen = place // BLOCK_E * per_group + place % BLOCK_E
        ids = tl.where(k == i, tl.minimum(chosen, experts - 1), ids)
        weights = tl.where(k == i, score, weights)
        flat = tl.where(winner, float("-inf"), flat)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = weights * scale
    # Shared experts stand behind the others, and everybody chooses them.
    ids = tl.where(k < K, ids, experts + k - K)
    weights = tl.where(k < K, weights, 1.0)
    place = token * (K + num_shared) + k
    tl.store(ids_ptr + place, ids, mask=k < K + num_shared)
    tl.store(weights_ptr + place, weights, mask=k < K + num_shared)


def choose_experts(parts_STE: Tensor, bias_E: Tensor, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    """Weights (fp32) and ids (int64) of the chosen experts, best first, each [T, K + shared].

    parts_STE: contiguous, whose sum over S are the gate's logits. Shared experts follow the routed
    ones, with weight 1.
    """
    num_parts, tokens, experts = parts_STE.shape
    shape = (tokens, moe.num_chosen + moe.num_shared)
    ids_TK = torch.empty(shape, dtype=torch.int64, device=parts_STE.device)
    weights_TK = torch.empty(shape, dtype=torch.float32, device=parts_STE.device)
    limited = moe.num_chosen_groups < moe.num_groups
    groups = moe.num_groups if limited else 1
    if tokens:
        _choose_experts[(tokens,)](
            parts_STE,
            bias_E,
            ids_TK,
            weights_TK,
            tokens,
            num_parts,
            experts,
            experts // groups,
            moe.num_shared,
            moe.scale,
            min(4, power_of_two(num_parts)),
            moe.num_chosen,
            groups,
            moe.num_chosen_groups if limited else groups,
            moe.normalise,
            power_of_two(groups),
            power_of_two(experts // groups),
            power_of_two(shape[1]),
            # One warp: each of the K maxima is found without a barrier.
            num_warps=1,
        )
    return weights_TK, ids_TK
