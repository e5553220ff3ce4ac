"""Activations in fp8: e4m3 values with one scale for each 128 columns of a row.

    values[t, c] = x[t, c] / scale[c // 128, t],  scale = max(amax of the group, 1e-4) / 448

The scales lie group by group, so that a product reads those of many rows in one piece. The form
with SwiGLU takes gate and up side by side and quantises silu(gate) * up, so that the product is
never written in bf16. Reads nothing past the rows. Called in front of `fp8_linear` and
`fp8_experts`; the twin is `attention.kernels.fp8_rows.quantise` over groups.

Floor: bytes, 2 * D in and D + D / 32 out for each row, at 4.3 TB/s on one H200; below some hundred
rows the launch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...attention.kernels.fp8_round import fp8_scale, to_fp8
from ...attention.kernels.fp8_rows import FP8
from ...attention.kernels.launch import ceil_div, jit

GROUP = 128
_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class Fp8Rows:
    """values_TD: e4m3, contiguous. scales_GT: fp32, contiguous, G = D / 128."""

    values_TD: Tensor
    scales_GT: Tensor

    @classmethod
    def empty(cls, tokens: int, width: int, device: torch.device) -> "Fp8Rows":
        """Uninitialised."""
        values_TD = torch.empty(tokens, width, dtype=FP8, device=device)
        scales_GT = torch.empty(width // GROUP, tokens, dtype=torch.float32, device=device)
        return cls(values_TD, scales_GT)

    def padded(self, multiple: int) -> "Fp8Rows":
        """With rows of zeros behind them, to a multiple of so many."""
        missing = -len(self.values_TD) % multiple
        if not missing:
            return self
        raw_TD = F.pad(self.values_TD.view(torch.uint8), (0, 0, 0, missing))
        return Fp8Rows(raw_TD.view(FP8), F.pad(self.scales_GT, (0, missing)))

    def plain(self) -> Tensor:
        """The numbers themselves, fp32 [T, D]."""
        return self.values_TD.float() * self.scales_GT.t().repeat_interleave(GROUP, dim=1)


@jit
def _quantise(
    x_ptr,
    values_ptr,
    scales_ptr,
    tokens,
    groups,
    stride,
    SWIGLU: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    c = g[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    read = (g < groups)[:, None]
    x = tl.load(x_ptr + token * stride + c, mask=read, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(x_ptr + token * stride + groups * _GROUP + c, mask=read, other=0.0)
        x = x * tl.sigmoid(x) * up.to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(x), 1), POWER_OF_TWO)
    tl.store(values_ptr + token * groups * _GROUP + c, to_fp8(x, scale[:, None]), mask=read)
    tl.store(scales_ptr + g.to(tl.int64) * tokens + token, scale, mask=g < groups)


def quantise_rows(x_TD: Tensor, *, swiglu: bool = False, power_of_two: bool = False) -> Fp8Rows:
    """Rows [T, D] in any float dtype, D a multiple of 128; rows may lie apart.

    swiglu: x is [T, 2 D], gate and up, and silu(gate) * up is what is quantised.
    power_of_two: scales are rounded up to one ("ue8m0").
    Raises ValueError for another width.
    """
    tokens, width = x_TD.shape
    if swiglu:
        width //= 2
    if width % GROUP or x_TD.stride(1) != 1:
        raise ValueError(
            f"rows in fp8 are dense and a multiple of {GROUP} wide, got {tuple(x_TD.shape)} with "
            f"stride {x_TD.stride(1)}{', half of it gate' if swiglu else ''}"
        )
    groups, block = width // GROUP, 4
    rows = Fp8Rows.empty(tokens, width, x_TD.device)
    if tokens:
        _quantise[(tokens, ceil_div(groups, block))](
            x_TD,
            rows.values_TD,
            rows.scales_GT,
            tokens,
            groups,
            x_TD.stride(0),
            swiglu,
            power_of_two,
            block,
            num_warps=2,
        )
    return rows
