"""Block-scaled fp8 weights, as published checkpoints store them, turned into plain ones.

A weight [out, in] in e4m3 comes with `<name>_scale_inv` [ceil(out / 128), ceil(in / 128)], which
is multiplied in spite of its name (DeepSeek-V3, README_WEIGHTS).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
# In safetensors' spelling.
FP8 = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0", "U8")


@dataclass(frozen=True)
class Fp8Weights:
    """The same matrix of each of X experts: values_XED e4m3, scales_XBB fp32, both contiguous."""

    values_XED: Tensor
    scales_XBB: Tensor

    @classmethod
    def empty(cls, experts: int, rows: int, columns: int, device: torch.device) -> "Fp8Weights":
        """Uninitialised; rows and columns are multiples of 128."""
        shape = (experts, rows // BLOCK, columns // BLOCK)
        return cls(
            torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def scale_shape(weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight; blocks at the edges may be smaller than 128."""
    return tuple(-(-size // BLOCK) for size in weight_shape)


def plain_scale(scale: Tensor) -> Tensor:
    """fp32 scales of those in a checkpoint: floats, e8m0, or raw exponents (uint8: 2^(b - 127))."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def dequantise(weight_ED: Tensor, scale: Tensor) -> Tensor:
    """fp32 weight [out, in] of an e4m3 weight and its block scales as `plain_scale` takes them."""
    scale32 = plain_scale(scale)
    rows, columns = weight_ED.shape
    scale32 = scale32.repeat_interleave(BLOCK, dim=0)[:rows]
    return weight_ED.float() * scale32.repeat_interleave(BLOCK, dim=1)[:, :columns]


def quantise(weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 weight and fp32 block scales that `dequantise` undoes, up to fp8 rounding."""
    rows, columns = weight_ED.shape
    block_rows, block_columns = scale_shape((rows, columns))
    padded = torch.zeros(block_rows * BLOCK, block_columns * BLOCK)
    padded[:rows, :columns] = weight_ED
    blocks = padded.view(block_rows, BLOCK, block_columns, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-4) / torch.finfo(torch.float8_e4m3fn).max
    scaled = blocks / scale.view(block_rows, 1, block_columns, 1)
    values = scaled.view(block_rows * BLOCK, -1)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scale
