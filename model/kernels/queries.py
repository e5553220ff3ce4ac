"""Rotates the queries of a layer in place and sums up its index head weights, in one launch.

    q[t, h, first:] *= angles[t];  index_q[t, n, :R] *= angles[t];  weights[t, n] = scale * sum_s
    parts[s, t, n]

Pairs are adjacent and products fp32, rounded to the queries' dtype once (`layers.rope`). The parts
are those of `fp32_product`. Reads nothing past the rows. Called by `layers.mla` on a GPU; the twin
is `layers.rope.rotate_`.

Floor: a launch; at many tokens bytes, those of the rotated elements read and written, at 4.3 TB/s
on one H200.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ...attention.kernels.launch import ceil_div, jit, power_of_two

# Heads that one program rotates.
HEADS = 32


@dataclass(frozen=True)
class IndexParts:
    """q_TnD: index queries, contiguous, not yet rotated. parts_STn: fp32 sums that make the head
    weights, contiguous. scale: multiplies the weights."""

    q_TnD: Tensor
    parts_STn: Tensor
    scale: float


@jit
def _rotate_heads(
    q_ptr,
    angles_ptr,
    head,
    heads,
    head_stride,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate some heads [h] of one token; ROTATED is 2 * HALF elements, or fewer."""
    # Whole rows are read and written: elements of a pair apart would move a sector twice.
    r = tl.arange(0, 2 * HALF)
    place = head[:, None] * head_stride + r[None, :]
    mask = (head < heads)[:, None] & (r < ROTATED)[None, :]
    angles = tl.load(angles_ptr + r, mask=r < ROTATED, other=0.0)
    cosine, sine = tl.split(tl.reshape(angles, (1, HALF, 2)))
    pairs = tl.load(q_ptr + place, mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(pairs.to(tl.float32), (HEADS, HALF, 2)))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    tl.store(q_ptr + place, tl.reshape(turned, (HEADS, 2 * HALF)).to(pairs.dtype), mask=mask)


@jit
def _finish(
    q_ptr,
    angles_ptr,
    index_ptr,
    parts_ptr,
    weights_ptr,
    tokens,
    q_blocks,
    heads,
    q_token_stride,
    q_head_stride,
    index_heads,
    index_width,
    num_parts,
    scale,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (t, j): the j-th block of heads of token t, those of attention first."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    angles_ptr += token * ROTATED
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        q_ptr += token * q_token_stride
        _rotate_heads(q_ptr, angles_ptr, head, heads, q_head_stride, ROTATED, HALF, HEADS)
    elif index_ptr is not None:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        index_ptr += token * index_heads * index_width
        _rotate_heads(index_ptr, angles_ptr, head, index_heads, index_width, ROTATED, HALF, HEADS)
        is_head = head < index_heads
        weight = tl.zeros((HEADS,), tl.float32)
        for part in range(num_parts):
            place = (part * tokens + token) * index_heads + head
            weight += tl.load(parts_ptr + place, mask=is_head, other=0.0)
        tl.store(weights_ptr + token * index_heads + head, weight * scale, mask=is_head)


def rotate_queries(rope_THR: Tensor, angles_TR: Tensor) -> None:
    """Rotate the queries of attention in place.

    rope_THR: the rotated part of the heads, whose elements are dense. angles_TR: complex64
    [T, R / 2], contiguous. Raises ValueError for other layouts.
    """
    _launch(rope_THR, angles_TR, None, None)


def finish_queries(rope_THR: Tensor, angles_TR: Tensor, index: IndexParts) -> Tensor:
    """`rotate_queries`, the index queries as well; returns the index head weights, fp32 [T, n]."""
    shape = index.parts_STn.shape[1:]
    weights_Tn = torch.empty(shape, dtype=torch.float32, device=rope_THR.device)
    _launch(rope_THR, angles_TR, index, weights_Tn)
    return weights_Tn


def _launch(
    rope_THR: Tensor, angles_TR: Tensor, index: IndexParts | None, weights_Tn: Tensor | None
) -> None:
    tokens, heads, rotated = rope_THR.shape
    if rope_THR.stride(2) != 1 or not angles_TR.is_contiguous():
        raise ValueError(
            f"elements of a head and angles are dense, got strides {rope_THR.stride()} and "
            f"{angles_TR.stride()}"
        )
    q_blocks, index_heads, index_width, num_parts = ceil_div(heads, HEADS), 0, 0, 0
    if index is not None:
        num_parts, _, index_heads = index.parts_STn.shape
        index_width = index.q_TnD.shape[2]
    if not tokens:
        return
    _finish[(tokens, q_blocks + ceil_div(index_heads, HEADS))](
        rope_THR,
        torch.view_as_real(angles_TR),
        index.q_TnD if index else None,
        index.parts_STn if index else None,
        weights_Tn,
        tokens,
        q_blocks,
        heads,
        rope_THR.stride(0),
        rope_THR.stride(1),
        index_heads,
        index_width,
        num_parts,
        index.scale if index else 0.0,
        rotated,
        power_of_two(rotated // 2),
        HEADS,
        num_warps=4,
    )
