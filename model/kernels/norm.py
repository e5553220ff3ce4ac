"""RMSNorm of rows, with the sum in front of it and the rounding to fp8 behind it, in one launch.

    x[t] += delta[t];  normed[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight

Statistics are fp32, and every rounding to x's dtype happens where `layers.norm` does it. The fp8
form is that of `fp8_rows`, from the normed numbers as they were rounded. Reads nothing past the
rows. Called by `layers.norm` on a GPU; the twin is `RmsNorm` on a CPU.

Floor: bytes, 2 * D in (4 * D with a sum) and 2 * D out (or 4 * D, and D for fp8) for each row, at
4.3 TB/s on one H200; below some hundred rows the launch.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...attention.kernels.fp8_round import fp8_scale, to_fp8
from ...attention.kernels.launch import jit, power_of_two
from .fp8_rows import GROUP, Fp8Rows


@jit
def _norm_rows(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    values_ptr,
    scales_ptr,
    eps,
    width,
    x_stride,
    delta_stride,
    tokens,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    c = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = c < width
    x = tl.load(x_ptr + token * x_stride + c, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + token * delta_stride + c, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + token * x_stride + c, x, mask=inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / width + eps)
    normed = (wide * inverse).to(x.dtype).to(tl.float32)
    normed = (normed * weight.to(tl.float32)).to(x.dtype)
    if out_ptr is not None:
        tl.store(out_ptr + token * width + c, normed, mask=inside)
    if values_ptr is not None:
        normed = normed.to(tl.float32)
        scale = fp8_scale(tl.max(tl.abs(normed), 1), False)
        tl.store(values_ptr + token * width + c, to_fp8(normed, scale[:, None]), mask=inside)
        place = scales_ptr + group.to(tl.int64) * tokens + token
        tl.store(place, scale, mask=group < width // GROUP)


def norm_rows(x_TD: Tensor, weight_D: Tensor, eps: float, delta_TD: Tensor | None = None) -> Tensor:
    """The norm of rows [T, D] in x's dtype; with delta_TD of x_TD + delta_TD, which x_TD becomes.

    Rows may lie apart, their elements may not.
    """
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, weight_D, eps, delta_TD, out_TD, None)
    return out_TD


def norm_fp8_rows(
    x_TD: Tensor, weight_D: Tensor, eps: float, delta_TD: Tensor | None = None
) -> tuple[Tensor, Fp8Rows]:
    """`norm_rows`, and the same rows in fp8; D is a multiple of 128."""
    tokens, width = x_TD.shape
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    fp8 = Fp8Rows.empty(tokens, width, x_TD.device)
    _launch(x_TD, weight_D, eps, delta_TD, out_TD, fp8)
    return out_TD, fp8


def _launch(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    delta_TD: Tensor | None,
    out_TD: Tensor,
    fp8: Fp8Rows | None,
) -> None:
    tokens, width = x_TD.shape
    for rows in (x_TD, delta_TD):
        if rows is not None and (rows.shape != x_TD.shape or rows.stride(1) != 1):
            raise ValueError(
                f"rows to add and to norm are dense and alike, got {tuple(rows.shape)} with "
                f"stride {rows.stride(1)} beside {tuple(x_TD.shape)}"
            )
    if fp8 is not None and width % GROUP:
        raise ValueError(f"rows in fp8 are a multiple of {GROUP} wide, got {width}")
    if not tokens:
        return
    groups = power_of_two(-(-width // GROUP))
    _norm_rows[(tokens,)](
        x_TD,
        delta_TD,
        weight_D,
        out_TD,
        fp8.values_TD if fp8 else None,
        fp8.scales_GT if fp8 else None,
        eps,
        width,
        x_TD.stride(0),
        delta_TD.stride(0) if delta_TD is not None else 0,
        tokens,
        groups,
        GROUP,
        num_warps=max(1, min(16, groups // 4)),
    )
