"""What a token leaves in the cache, in one launch: norms, rope, fp8 and the scatter.

A token's projected row is its index key k (D) where the layer has an indexer, its latent c (C) and
the shared rotary key kr (R). Into its slot go

    RMSNorm(c) * weight, rope(kr)           bf16, fp16, fp32, or fp8 rows (`fp8_rows`)
    rope(LayerNorm(k) * weight + bias)      the model's dtype, or fp8 pages

Statistics are fp32 and every rounding to the model's dtype happens where `model.layers.norm` and
`model.layers.rope` do it. Rotated pairs are adjacent; of the index key the first R are rotated.
The index queries of a layer get their rope and their fp8 by a second kernel.

Floor: a launch. A V3.2 token reads 1408 bytes and writes 788 (fp8).
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from .fp8_round import fp8_scale, to_fp8
from .fp8_rows import FP8, Fp8LatentRows, IndexPages
from .launch import jit


@dataclass(frozen=True)
class LatentWrite:
    """weight_C: of the RMSNorm, the model's dtype. cache: [S, C + R] of that dtype, or fp8 rows."""

    weight_C: Tensor
    cache: Tensor | Fp8LatentRows


@dataclass(frozen=True)
class IndexWrite:
    """weight_D, bias_D: of the LayerNorm, fp32. cache: [S, D] of the model's dtype, or pages."""

    weight_D: Tensor
    bias_D: Tensor
    cache: Tensor | IndexPages


def write_rows(
    projected_TE: Tensor,
    angles_TR: Tensor,
    slots_T: Tensor,
    latent: LatentWrite,
    index: IndexWrite | None,
    eps: float = 1e-6,
    *,
    power_of_two: bool = False,
) -> None:
    """Write the rows of T tokens into their slots; a negative slot is skipped.

    projected_TE: [T, (D +) C + R] in the model's dtype; rows may be part of wider ones.
    angles_TR: complex64 [T, R / 2]. slots_T: int64, each at most once. power_of_two: fp8 scales.
    C, R and D are powers of two; C at least 128 for fp8. Raises TypeError for other dtypes.
    """
    tokens = len(projected_TE)
    width = len(latent.weight_C)
    if slots_T.dtype != torch.int64 or angles_TR.dtype != torch.complex64:
        raise TypeError(f"slots are int64, angles complex64: {slots_T.dtype}, {angles_TR.dtype}")
    if projected_TE.stride(-1) != 1:
        raise ValueError("the elements of a projected row must be contiguous")
    if not tokens:
        return
    values, scales, rope = _latent_views(latent, width)
    keys, key_scales, page, scatter = _index_views(index)
    _write[(tokens, 2 if index else 1)](
        projected_TE,
        torch.view_as_real(angles_TR).contiguous(),
        slots_T,
        latent.weight_C,
        values,
        scales,
        rope,
        index.weight_D if index else None,
        index.bias_D if index else None,
        keys,
        key_scales,
        eps,
        projected_TE.stride(0),
        values.stride(0),
        scales.stride(0) if scales is not None else 0,
        rope.stride(0),
        *scatter,
        C=width,
        R=2 * angles_TR.shape[1],
        D=len(index.weight_D) if index else 0,
        PAGE=page,
        LATENT_FP8=scales is not None,
        INDEX_FP8=key_scales is not None,
        POWER_OF_TWO=power_of_two,
        num_warps=4,
    )


def _latent_views(latent: LatentWrite, width: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Where latents, their scales and rotated keys go: [S, ...] views with a stride each."""
    if isinstance(latent.cache, Fp8LatentRows):
        return latent.cache.values_SC, latent.cache.scales_SB, latent.cache.rope_SR
    return latent.cache[:, :width], None, latent.cache[:, width:]


def _index_views(
    index: IndexWrite | None,
) -> tuple[Tensor | None, Tensor | None, int, tuple[int, int, int]]:
    """Values, scales, rows of a page, and the strides of a page, of a row, of a page's scales."""
    if index is None:
        return None, None, 1, (0, 0, 0)
    if isinstance(index.cache, IndexPages):
        values, scales = index.cache.values_NPD, index.cache.scales_NP
        strides = (values.stride(0), values.stride(1), scales.stride(0))
        return values, scales, index.cache.page_size, strides
    return index.cache, None, 1, (index.cache.stride(0), 0, 0)


def quantise_index_queries(
    q_TnD: Tensor, weights_Tn: Tensor, angles_TR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, n, D], and the head weights (fp32) times the queries' scales.

    q_TnD: the model's dtype, contiguous. angles_TR: complex64 [T, R / 2] to rotate the first R of
    D by, rounded to the model's dtype before quantising; None where they are rotated already.
    """
    tokens, heads, width = q_TnD.shape
    q8_TnD = torch.empty_like(q_TnD, dtype=FP8)
    scaled_Tn = torch.empty_like(weights_Tn, dtype=torch.float32)
    if tokens:
        real = torch.view_as_real(angles_TR).contiguous() if angles_TR is not None else None
        _quantise_queries[(tokens,)](
            q_TnD,
            weights_Tn,
            real,
            q8_TnD,
            scaled_Tn,
            N=heads,
            D=width,
            R=2 * angles_TR.shape[1] if angles_TR is not None else 0,
            num_warps=4,
        )
    return q8_TnD, scaled_Tn


@jit
def _rotate(pairs, angles_ptr, WIDTH: tl.constexpr, R: tl.constexpr):
    """Pairs [..., WIDTH / 2, 2] in fp32 times the token's angles; behind R as they are."""
    column = tl.arange(0, WIDTH // 2)
    inside = column < R // 2
    cosine = tl.load(angles_ptr + 2 * column, mask=inside, other=1.0)
    sine = tl.load(angles_ptr + 2 * column + 1, mask=inside, other=0.0)
    even, odd = tl.split(pairs)
    return tl.join(even * cosine - odd * sine, even * sine + odd * cosine)


@jit
def _write(
    projected_ptr,
    angles_ptr,
    slots_ptr,
    weight_ptr,
    latent_ptr,
    scales_ptr,
    rope_ptr,
    index_weight_ptr,
    index_bias_ptr,
    keys_ptr,
    key_scales_ptr,
    eps,
    projected_stride,
    latent_stride,
    scales_stride,
    rope_stride,
    page_stride,
    key_stride,
    key_scales_stride,
    C: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT_FP8: tl.constexpr,
    INDEX_FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Program (t, 0): token t's latent and rotated key. (t, 1): its index key."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    projected_ptr += token * projected_stride
    angles_ptr += token * R
    if tl.program_id(1) == 0:
        projected_ptr += D
        latent = _rms_norm(projected_ptr, weight_ptr, eps, C)
        latent_ptrs = latent_ptr + slot * latent_stride + tl.arange(0, C)
        if LATENT_FP8:
            blocks = tl.reshape(latent.to(tl.float32), (C // 128, 128))
            scale = fp8_scale(tl.max(tl.abs(blocks), axis=1), POWER_OF_TWO)
            tl.store(latent_ptrs, tl.reshape(to_fp8(blocks, scale[:, None]), (C,)))
            tl.store(scales_ptr + slot * scales_stride + tl.arange(0, C // 128), scale)
        else:
            tl.store(latent_ptrs, latent)
        rope = tl.load(projected_ptr + C + tl.arange(0, R))
        pairs = tl.reshape(rope.to(tl.float32), (R // 2, 2))
        rope = tl.reshape(_rotate(pairs, angles_ptr, R, R), (R,)).to(rope.dtype)
        rope_ptrs = rope_ptr + slot * rope_stride + tl.arange(0, R)
        tl.store(rope_ptrs, rope.to(rope_ptr.dtype.element_ty))
    elif D > 0:
        key = _layer_norm(projected_ptr, index_weight_ptr, index_bias_ptr, eps, D)
        key_pairs = tl.reshape(key.to(tl.float32), (D // 2, 2))
        key = tl.reshape(_rotate(key_pairs, angles_ptr, D, R), (D,)).to(key.dtype)
        key_ptrs = keys_ptr + slot // PAGE * page_stride + slot % PAGE * key_stride
        key_ptrs += tl.arange(0, D)
        if INDEX_FP8:
            wide = key.to(tl.float32)
            key_scale = fp8_scale(tl.max(tl.abs(wide)), POWER_OF_TWO)
            tl.store(key_ptrs, to_fp8(wide, key_scale))
            place = slot // PAGE * key_scales_stride + slot % PAGE
            tl.store(key_scales_ptr + place, key_scale)
        else:
            tl.store(key_ptrs, key)


@jit
def _rms_norm(row_ptr, weight_ptr, eps, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    row = tl.load(row_ptr + columns)
    wide = row.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns)
    normed = (wide * inverse).to(row.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(row.dtype)


@jit
def _layer_norm(row_ptr, weight_ptr, bias_ptr, eps, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    row = tl.load(row_ptr + columns)
    wide = row.to(tl.float32)
    centred = wide - tl.sum(wide) / WIDTH
    inverse = tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    normed = centred * inverse * tl.load(weight_ptr + columns) + tl.load(bias_ptr + columns)
    return normed.to(row.dtype)


@jit
def _quantise_queries(
    q_ptr,
    weights_ptr,
    angles_ptr,
    q8_ptr,
    scaled_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """Program t: all heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + token * N * D + places)
    if angles_ptr is not None:
        pairs = tl.reshape(q.to(tl.float32), (N, D // 2, 2))
        q = tl.reshape(_rotate(pairs, angles_ptr + token * R, D, R), (N, D)).to(q.dtype)
    q = q.to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(q), axis=1), False)
    tl.store(q8_ptr + token * N * D + places, to_fp8(q, scale[:, None]))
    heads = token * N + tl.arange(0, N)
    tl.store(scaled_ptr + heads, tl.load(weights_ptr + heads).to(tl.float32) * scale)
