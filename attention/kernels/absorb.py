"""The way into the latent space and out of it: each head's rows times its own matrix.

    q[t, h] = scale * (q_nope[t, h] W_UK,h, q_rope[t, h])        [T, H, C + R]
    out[t, h] = W_UV,h latent[t, h]                              [T, H, V]

Results are written where they are used, so that nothing is transposed, joined or scaled apart.
Sums are fp32 and rounded once. The products of prompts are cuBLAS's, written in place as well.
Reads past the mask: nothing. Called by the backends whose kernels attend in place; the twins are
`reference.absorbed_query` and `reference.unabsorb`.

Floor on one H200: H * N * C weights at 4.3 TB/s (16.8 MB, 3.9 us for V3.2 in bf16), or
2 * T * H * N * C operations at 989 TFLOP/s.
"""

import torch
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, jit, power_of_two

# From here on cuBLAS is faster.
MANY_TOKENS = 1024


@jit
def _absorb(
    nope_ptr,
    rope_ptr,
    w_ptr,
    out_ptr,
    tokens,
    nope_token_stride,
    nope_head_stride,
    rope_token_stride,
    rope_head_stride,
    w_head_stride,
    w_row_stride,
    scale,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (h, j, i): columns of the j-th block of head h, the first with the rotated part."""
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    is_token = (t < tokens)[:, None]
    n = tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = t[:, None] * nope_token_stride + head * nope_head_stride + n[None, :]
    q = tl.load(nope_ptr + place, mask=is_token & (n < N)[None, :], other=0.0)
    w_place = head * w_head_stride + n[:, None] * w_row_stride + c[None, :]
    w = tl.load(w_ptr + w_place, mask=(n < N)[:, None] & (c < C)[None, :], other=0.0)
    latent = tl.dot(q, w, input_precision="ieee") * scale
    out_ptrs = out_ptr + (t[:, None] * heads + head) * (C + R)
    out_type = out_ptr.dtype.element_ty
    tl.store(out_ptrs + c[None, :], latent.to(out_type), mask=is_token & (c < C)[None, :])
    if tl.program_id(1) == 0:
        r = tl.arange(0, BLOCK_R)
        mask = is_token & (r < R)[None, :]
        rope_place = t[:, None] * rope_token_stride + head * rope_head_stride + r[None, :]
        rope = tl.load(rope_ptr + rope_place, mask=mask, other=0.0).to(tl.float32) * scale
        tl.store(out_ptrs + C + r[None, :], rope.to(out_type), mask=mask)


@jit
def _unabsorb(
    latent_ptr,
    w_ptr,
    out_ptr,
    tokens,
    latent_token_stride,
    latent_head_stride,
    w_head_stride,
    w_row_stride,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (h, j, i): values of the j-th block of head h."""
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token, is_value = (t < tokens)[:, None], (v < V)[None, :]
    latent_ptrs = latent_ptr + t[:, None] * latent_token_stride + head * latent_head_stride
    w_ptrs = w_ptr + head * w_head_stride + v[None, :] * w_row_stride
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for first in tl.range(0, C, BLOCK_C, num_stages=STAGES):
        c = first + tl.arange(0, BLOCK_C)
        latent = tl.load(latent_ptrs + c[None, :], mask=is_token & (c < C)[None, :], other=0.0)
        w = tl.load(w_ptrs + c[:, None], mask=is_value & (c < C)[:, None], other=0.0)
        acc = tl.dot(latent, w, acc, input_precision="ieee")
    place = (t[:, None] * heads + head) * V + v[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=is_token & is_value)


def absorb_queries(nope_THN: Tensor, rope_THR: Tensor, w_uk_HNC: Tensor, scale: float) -> Tensor:
    """Queries against latent rows, [T, H, C + R]; arguments as for `reference.absorbed_query`.

    Elements of a head and rows of a weight are dense.
    """
    (tokens, heads, nope), latent, rope = nope_THN.shape, w_uk_HNC.shape[2], rope_THR.shape[2]
    _require_dense(nope_THN, rope_THR, w_uk_HNC)
    out_THX = nope_THN.new_empty(tokens, heads, latent + rope)
    if tokens >= MANY_TOKENS:
        out_HTC = out_THX[..., :latent].transpose(0, 1)
        q_HTN = nope_THN.transpose(0, 1)
        torch.baddbmm(out_HTC, q_HTN, w_uk_HNC, beta=0, alpha=scale, out=out_HTC)
        torch.mul(rope_THR, scale, out=out_THX[..., latent:])
    elif tokens:
        block_t, block_c = _token_block(tokens), min(128, max(16, power_of_two(latent)))
        _absorb[(heads, ceil_div(latent, block_c), ceil_div(tokens, block_t))](
            nope_THN,
            rope_THR,
            w_uk_HNC,
            out_THX,
            tokens,
            *nope_THN.stride()[:2],
            *rope_THR.stride()[:2],
            *w_uk_HNC.stride()[:2],
            scale,
            nope,
            latent,
            rope,
            block_t,
            max(16, power_of_two(nope)),
            block_c,
            power_of_two(rope),
            num_warps=4,
        )
    return out_THX


def unabsorb_latents(latent_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
    """Attended latents moved out to values, [T, H, V], contiguous."""
    (tokens, heads, latent), values = latent_THC.shape, w_uv_HVC.shape[1]
    _require_dense(latent_THC, w_uv_HVC)
    out_THV = latent_THC.new_empty(tokens, heads, values)
    if tokens >= MANY_TOKENS:
        weight_HCV = w_uv_HVC.transpose(1, 2)
        torch.bmm(latent_THC.transpose(0, 1), weight_HCV, out=out_THV.transpose(0, 1))
    elif tokens:
        block_t = _token_block(tokens)
        # Few tokens: twice as many programs read the weights.
        most = 64 if tokens <= 64 else 128
        block_v = min(most, max(16, power_of_two(values)))
        _unabsorb[(heads, ceil_div(values, block_v), ceil_div(tokens, block_t))](
            latent_THC,
            w_uv_HVC,
            out_THV,
            tokens,
            *latent_THC.stride()[:2],
            *w_uv_HVC.stride()[:2],
            values,
            latent,
            block_t,
            block_v,
            min(128, max(16, power_of_two(latent))),
            3,
            num_warps=4 if block_t <= 64 else 8,
        )
    return out_THV


def _token_block(tokens: int) -> int:
    return min(128, max(16, power_of_two(tokens)))


def _require_dense(*operands: Tensor) -> None:
    for operand in operands:
        if operand.stride(2) != 1:
            raise ValueError(f"elements of a row are dense, got strides {operand.stride()}")
