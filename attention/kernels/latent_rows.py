"""Cached latent rows as attention kernels read them, in the model's format or in fp8.

An fp8 row (`fp8_rows.py`) is multiplied as fp16: e4m3 fits fp16 exactly and
converts in one instruction a pair, where bf16 takes a detour through fp32. Scales are raised by
2^4 and queries lowered by as much, so that scales down to 4e-6 (a group whose largest element is
0.0017) keep all their bits, and latents up to 4000 do not overflow.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton.language as tl
from torch import Tensor

from .fp8_rows import BLOCK, Fp8LatentRows
from .launch import jit, power_of_two

# A power of two, so nothing is rounded: see above.
RAISE = tl.constexpr(16.0)


@jit
def load_columns(pointers, read, FIRST: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Columns FIRST..FIRST + WIDTH - 1 behind row pointers [n, 1], in groups of GROUP; zeros where
    `read` [n, 1] is False and behind the last column. A width below 16 is padded to GROUP."""
    groups = ()
    for g in tl.static_range((WIDTH + GROUP - 1) // GROUP):  # pyright: ignore
        c = g * GROUP + tl.arange(0, GROUP)[None, :]
        if WIDTH % GROUP == 0:
            groups = groups + (tl.load(pointers + FIRST + c, mask=read, other=0.0),)
        else:
            mask = read & (c < WIDTH)
            groups = groups + (tl.load(pointers + FIRST + c, mask=mask, other=0.0),)
    return groups


@jit
def load_rows(
    latent_ptr,
    rope_ptr,
    scale_ptr,
    slot,
    stride,
    read,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FP8: tl.constexpr,
):
    """The latents of the rows in `slot` [n] and their rotary parts, both as groups of columns.

    stride: from row to row, in units of UNIT bytes. A stride by itself says nothing of alignment
    to the compiler unless 16 divides it; its multiple of 16 bytes does.
    """
    row = slot.to(tl.int64)[:, None] * stride
    read = read[:, None]
    size: tl.constexpr = latent_ptr.dtype.element_ty.primitive_bitwidth // 8
    rope_size: tl.constexpr = rope_ptr.dtype.element_ty.primitive_bitwidth // 8
    latent = load_columns(latent_ptr + row * (UNIT // size), read, 0, C, GROUP)
    rope = load_columns(rope_ptr + row * (UNIT // rope_size), read, 0, R, BLOCK_R)
    if FP8:
        tl.static_assert(GROUP == 128)
        raised = ()
        for g in tl.static_range(C // GROUP):  # pyright: ignore
            scale = tl.load(scale_ptr + row * (UNIT // 4) + g, mask=read, other=0.0)
            raised = raised + (latent[g].to(tl.float16) * (scale * RAISE).to(tl.float16),)
        return raised, rope
    else:
        return latent, rope


@dataclass(frozen=True)
class Rows:
    """One layer's rows [S, X] and the views of them that kernels take.

    unit: bytes that divide the distance of two rows, at most 16; stride: that distance in units.
    """

    latent_SC: Tensor
    rope_SR: Tensor
    scales_SG: Tensor
    is_fp8: bool
    unit: int
    stride: int

    @classmethod
    def of(cls, rows_SX: Tensor, latent_width: int, rope_width: int) -> "Rows":
        """The views; raises ValueError when the rows are not as wide as these widths make them."""
        is_fp8 = rows_SX.dtype == torch.uint8
        expected = latent_width + rope_width
        if is_fp8:
            expected += latent_width // BLOCK * 4 + rope_width
        if rows_SX.shape[1] != expected or rows_SX.stride(1) != 1:
            raise ValueError(
                f"a cached row for {latent_width} + {rope_width} elements is {expected} wide and "
                f"dense, got {rows_SX.shape[1]} with stride {rows_SX.stride(1)}"
            )
        distance = rows_SX.stride(0) * rows_SX.itemsize
        unit = gcd(distance, 16)
        if not is_fp8:
            rope_SR = rows_SX[:, latent_width:]
            return cls(rows_SX, rope_SR, rows_SX, False, unit, distance // unit)
        if unit < 4:
            raise ValueError(f"fp8 rows lie a multiple of 4 bytes apart, got {distance}")
        fp8 = Fp8LatentRows(rows_SX, latent_width)
        return cls(fp8.values_SC, fp8.rope_SR, fp8.scales_SB, True, unit, distance // unit)


@dataclass(frozen=True)
class Queries:
    """Absorbed queries [.., C + R] as kernels take them: latent part and rotary part.

    For fp8 rows the latent part is an fp16 copy, lowered by RAISE.
    """

    latent: Tensor
    rope: Tensor

    @classmethod
    def of(cls, q_THX: Tensor, latent_width: int, is_fp8: bool) -> "Queries":
        latent, rope = q_THX[..., :latent_width], q_THX[..., latent_width:]
        if is_fp8:
            lowered = torch.empty(latent.shape, dtype=torch.float16, device=latent.device)
            latent = torch.mul(latent, 1.0 / RAISE.value, out=lowered)
        return cls(latent, rope)


def group_width(width: int, largest: int) -> int:
    """Columns of a group: a power of two of at least 16 that wastes little of `width`."""
    return max(16, min(largest, width & -width, power_of_two(width)))
