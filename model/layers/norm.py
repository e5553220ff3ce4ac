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
        # Few small kernels: on a CPU the composite F.rms_norm takes twice as long.
        squares_T1 = torch.linalg.vecdot(x32_TD, x32_TD).unsqueeze(-1)
        inverse_T1 = torch.add(self.eps, squares_T1, alpha=self._share).rsqrt_()
        return (x32_TD * inverse_T1).to(x_TD.dtype).mul_(self.weight_D)

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
