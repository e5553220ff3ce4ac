"""Causal attention of prompt chunks over expanded keys and values, ragged and in rounds.

    out[t, h] = sum_i softmax_i(scale * (q[t, h] . k[h, i] + q_rope[t, h] . rope[i])) v[h, i]

with i over the keys up to the token's own position. A chunk's prefix is expanded a bounded number
of keys at a time: each round goes on from the result and log-sum-exp of the one before, as the
online softmax goes on from tile to tile. All requests of a step share a round's launch.

A program takes 128 tokens of one head. Read past the mask: keys and values behind a token's own
position, up to the end of its block's tile; they must be finite, and are: they are rows of the same
chunk. Called by `dense.triton`; the twin is `reference.expanded_attention`.

Floor on one H200: 2 * H * (N + R + V) operations for each pair of a token and a key that it sees at
790 TFLOP/s (bf16); 4096 tokens of a fresh prompt, 128 heads of 128 + 64 and 128: 0.87 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ..metadata import Part
from .latent_rows import group_width, load_columns
from .launch import jit
from .online_softmax import LOG2E, add_values, dots, log_sum_exp, weigh

TOKENS_OF_A_BLOCK = 128


@jit
def _attend_expanded(
    q_ptr,
    q_rope_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    blocks_ptr,
    out_ptr,
    lse_ptr,
    scale,
    heads,
    num_blocks,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_kh,
    stride_kl,
    stride_rope,
    stride_vh,
    stride_vl,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GOES_ON: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbours share a head, and with it the keys and values in the L2 cache.
    head = (tl.program_id(0) // num_blocks).to(tl.int64)
    block_ptr = blocks_ptr + tl.program_id(0) % num_blocks * 6
    token = tl.load(block_ptr)
    tokens = tl.load(block_ptr + 1)
    position = tl.load(block_ptr + 2)
    first = tl.load(block_ptr + 3)
    last = tl.load(block_ptr + 4)
    place = tl.load(block_ptr + 5)

    m = tl.arange(0, BLOCK_M)
    is_row = m < tokens
    row = (token + m).to(tl.int64)
    q = load_columns(
        q_ptr + row[:, None] * stride_qt + head * stride_qh, is_row[:, None], 0, N, GROUP_N
    )
    q_rope = load_columns(
        q_rope_ptr + row[:, None] * stride_rt + head * stride_rh, is_row[:, None], 0, R, GROUP_R
    )
    result = row * heads + head
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = ()
    for _ in tl.static_range((V + GROUP_V - 1) // GROUP_V):
        acc = acc + (tl.zeros((BLOCK_M, GROUP_V), tl.float32),)
    if GOES_ON:
        # A weighted mean with its log-sum-exp is a sum of weights 1 with the largest score so far.
        before = is_row & (first > 0)
        largest = tl.load(lse_ptr + result, mask=before, other=float("-inf")) * LOG2E
        total = tl.where(largest > float("-inf"), 1.0, 0.0)
        acc = load_columns(out_ptr + result[:, None] * V, before[:, None], 0, V, GROUP_V)

    end = tl.minimum(last, position + tokens)
    for begin in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        n = begin + tl.arange(0, BLOCK_N)
        inside = (n < end)[:, None]
        key = (place + n - first).to(tl.int64)[:, None]
        k = load_columns(k_ptr + head * stride_kh + key * stride_kl, inside, 0, N, GROUP_N)
        rope = load_columns(rope_ptr + key * stride_rope, inside, 0, R, GROUP_R)
        v = load_columns(v_ptr + head * stride_vh + key * stride_vl, inside, 0, V, GROUP_V)
        scores = dots(q_rope, rope, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        scores = dots(q, k, scores) * scale
        seen = (n[None, :] <= (position + m)[:, None]) & (n < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, largest, total = weigh(scores, largest, total)
        acc = add_values(weights.to(v[0].dtype), shrink, v, acc)

    lse, divisor = log_sum_exp(largest, total)
    tl.store(lse_ptr + result, lse, mask=is_row)
    for g in tl.static_range(len(acc)):
        c = g * GROUP_V + tl.arange(0, GROUP_V)[None, :]
        out = (acc[g] / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + result[:, None] * V + c, out, mask=is_row[:, None] & (c < V))


@dataclass(frozen=True)
class PrefillRound:
    """Keys that are expanded together, and the blocks of tokens that see any of them.

    slots_L: int64, where the keys' rows lie. blocks_X6: int32, for each block: its first token in
    the part, tokens, position of the first in its request, first key, one behind the last key, and
    where the first key stands among the round's.
    """

    slots_L: Tensor
    blocks_X6: Tensor


def prefill_rounds(part: Part, table_BL: Tensor, keys_at_once: int) -> list[PrefillRound]:
    """The extends of a step in rounds of at most `keys_at_once` keys; table_BL: int64 slots."""
    rounds = []
    for spans in _spans(part.kv_lens, max(1, keys_at_once)):
        places = [table_BL[request, first:last] for request, first, last in spans]
        blocks: list[tuple[int, ...]] = []
        offset = 0
        for request, first, last in spans:
            context, tokens = part.context_lens[request], part.query_lens[request]
            # Blocks begin at the same tokens in each round; those before the span see none of it.
            for start in range(0, tokens, TOKENS_OF_A_BLOCK):
                size = min(TOKENS_OF_A_BLOCK, tokens - start)
                if context + start + size > first:
                    token = part.starts[request] + start
                    blocks.append((token, size, context + start, first, last, offset))
            offset += last - first
        # The longest first: none of them is left for the end, when the others are done.
        blocks.sort(key=lambda block: -min(block[4], block[2] + block[1]) + block[3])
        blocks_X6 = torch.tensor(blocks, dtype=torch.int32, device=table_BL.device)
        rounds.append(PrefillRound(torch.cat(places), blocks_X6))
    return rounds


def _spans(lengths: Sequence[int], keys_at_once: int) -> list[list[tuple[int, int, int]]]:
    """(request, first key, one behind the last): lists of at most so many keys, all in order."""
    rounds: list[list[tuple[int, int, int]]] = []
    room = 0
    for request, length in enumerate(lengths):
        first = 0
        while first < length:
            if not room:
                rounds.append([])
                room = keys_at_once
            last = min(length, first + room)
            rounds[-1].append((request, first, last))
            room -= last - first
            first = last
    return rounds


@dataclass(frozen=True)
class ExpandedKeys:
    """Keys and values of a round's L rows: k_HLN and v_HLV by head, rope_LR shared by all heads."""

    k_HLN: Tensor
    rope_LR: Tensor
    v_HLV: Tensor


def mla_prefill(
    q_THN: Tensor,
    q_rope_THR: Tensor,
    keys: ExpandedKeys,
    blocks_X6: Tensor,
    scale: float,
    out_THV: Tensor,
    lse_TH: Tensor,
) -> None:
    """One round, into out_THV and lse_TH (fp32, natural), both contiguous.

    With fp32 out_THV, tokens whose keys begin before this round's go on from what stands there;
    any other dtype is that of the queries and needs all keys in one round. Rows of the last
    dimension are dense, other strides are free.
    """
    _, heads, width = q_THN.shape
    rope_width, v_width = q_rope_THR.shape[2], keys.v_HLV.shape[2]
    num_blocks = len(blocks_X6)
    _attend_expanded[(num_blocks * heads,)](
        q_THN,
        q_rope_THR,
        keys.k_HLN,
        keys.rope_LR,
        keys.v_HLV,
        blocks_X6,
        out_THV,
        lse_TH,
        scale,
        heads,
        num_blocks,
        *q_THN.stride()[:2],
        *q_rope_THR.stride()[:2],
        *keys.k_HLN.stride()[:2],
        keys.rope_LR.stride(0),
        *keys.v_HLV.stride()[:2],
        width,
        rope_width,
        v_width,
        group_width(width, 128),
        group_width(rope_width, 128),
        group_width(v_width, 128),
        TOKENS_OF_A_BLOCK,
        64,
        out_THV.dtype == torch.float32,
        2,
        num_warps=8,
    )
