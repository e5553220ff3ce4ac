"""Where weights are allocated and multiplied.

Every matrix product of the model with a plain weight goes through `linear`, and every weight is
born in an `Allocator`, once, at its final place: fused projections are one tensor that the loader
fills slice by slice.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Allocator:
    """Makes uninitialised weights; on the `meta` device they have shapes and no memory."""

    dtype: torch.dtype
    device: torch.device

    def weight(self, *shape: int) -> Tensor:
        """A weight in the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, *shape: int) -> Tensor:
        """A weight [..., out, in] that rows are multiplied with, in the model's dtype.

        On a CPU its memory runs along `out`: a single row times a matrix then reads memory twice
        as fast (22 GB/s instead of 11 on the machine of benchmarks/results), many rows no slower.
        """
        *batch, rows, columns = shape
        if self.device.type != "cpu":
            return self.weight(*shape)
        return self.weight(*batch, columns, rows).transpose(-1, -2)

    def fp32(self, *shape: int) -> Tensor:
        """A weight that stays in fp32 whatever the model's dtype."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x [T, D] times the transpose of a weight [E, D]: [T, E]."""
    return F.linear(x_TD, weight_ED)
