"""RMSNorm and the index key's LayerNorm, with statistics in fp32."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Allocator

if TYPE_CHECKING:
    from ..kernels.fp8_rows import Fp8Rows

# The norms of the query and key latents and of the index key use this whatever `rms_norm_eps` says
# (transformers' DeepseekV3Attention); GLM and Moonlight, which set 1e-5, would show the difference.
LATENT_EPS = 1e-6


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, width: int, eps: float, allocate: Allocator) -> None:
        self.weight_D = allocate.weight(width)
        self.eps = torch.tensor(eps, device=allocate.device)
        self._eps = eps
        self._share = 1 / width

    def __call__(self, x_TD: Tensor) -> Tensor:
        if x_TD.is_cuda:
            return self._by_kernel(x_TD, None)
        x32_TD = x_TD.float()
        return (x32_TD * self._inverse(x32_TD)).to(x_TD.dtype).mul_(self.weight_D)

    def norm_(self, x_TD: Tensor) -> None:
        """The same in place."""
        if x_TD.is_cuda or x_TD.dtype != torch.float32:
            x_TD.copy_(self(x_TD))
        else:
            x_TD.mul_(self._inverse(x_TD)).mul_(self.weight_D)

    def _inverse(self, x32_TD: Tensor) -> Tensor:
        """1 / sqrt(mean(x^2) + eps), [T, 1]; the composite F.rms_norm would take half as long again
        for few rows."""
        length_T1 = torch.linalg.vector_norm(x32_TD, dim=-1, keepdim=True)
        return torch.addcmul(self.eps, length_T1, length_T1, value=self._share).rsqrt_()

    def add(self, x_TD: Tensor, delta_TD: Tensor | None) -> Tensor:
        """The norm of x_TD + delta_TD, which x_TD becomes; None adds nothing."""
        if x_TD.is_cuda:
            return self._by_kernel(x_TD, delta_TD)
        return self(x_TD if delta_TD is None else x_TD.add_(delta_TD))

    def in_fp8(self, x_TD: Tensor, delta_TD: Tensor | None) -> "tuple[Tensor, Fp8Rows]":
        """`add` on a GPU, with the same rows in fp8 for the product behind it."""
        from ..kernels.norm import norm_fp8_rows  # noqa: PLC0415 - only where triton is installed

        return norm_fp8_rows(x_TD, self.weight_D, self._eps, delta_TD)

    def _by_kernel(self, x_TD: Tensor, delta_TD: Tensor | None) -> Tensor:
        from ..kernels.norm import norm_rows  # noqa: PLC0415 - only where triton is installed

        return norm_rows(x_TD, self.weight_D, self._eps, delta_TD)


class LayerNorm:
    """The index key's norm: mean and variance, weight and bias, all in fp32."""

    def __init__(self, width: int, allocate: Allocator) -> None:
        self.weight_D = allocate.fp32(width)
        self.bias_D = allocate.fp32(width)

    def __call__(self, x_TD: Tensor) -> Tensor:
        shape = self.weight_D.shape
        normed_TD = F.layer_norm(x_TD.float(), shape, self.weight_D, self.bias_D, LATENT_EPS)
        return normed_TD.to(x_TD.dtype)
