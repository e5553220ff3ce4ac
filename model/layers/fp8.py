"""Products whose weight stays in fp8, as the checkpoint stores it: half the memory to read.

Activations are rounded to fp8 in groups of 128 columns (DeepSeek-V3, section 3.3). Few rows go to
our kernel, many to cuBLAS, whichever was measured to be faster (docs/performance.md).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fp8 import BLOCK, scale_shape

if TYPE_CHECKING:
    from ..kernels.fp8_rows import Fp8Rows

# cuBLAS takes no fewer rows than this, and is slower up to it.
MOST_ROWS = 64
# It reads so many scales at a time, of weights and of rows, and refuses rows that are no multiple.
SCALES_AT_ONCE = 4
FP8_CAPABILITY = (8, 9)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device's tensor cores multiply fp8."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


class Fp8Linear:
    """x [T, D] times the transpose of a block-scaled weight [E, D]: [T, E].

    weight_ED: e4m3, D a multiple of 128. scales: fp32 [ceil(E / 128), D / 128]. Both lie in memory
    as cuBLAS wants them: it gives NaN for blocks that are cut, so rows of zeros fill up the last.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        blocks, width = scale_shape((rows, columns))
        whole = (blocks * BLOCK, columns)
        self._whole_ED = torch.empty(whole, dtype=torch.float8_e4m3fn, device=device)
        self._whole_ED[rows:].zero_()
        self.weight_ED = self._whole_ED[:rows]
        padded = -(-width // SCALES_AT_ONCE) * SCALES_AT_ONCE
        self._padded = torch.zeros(blocks, padded, device=device)
        self.scales = self._padded[:, :width]

    def __call__(self, x_TD: Tensor) -> Tensor:
        from ..kernels.fp8_rows import quantise_rows  # noqa: PLC0415 - only where triton is installed

        return self.multiply(quantise_rows(x_TD), x_TD.dtype)

    def of_silu_product(self, gate_up_TE: Tensor) -> Tensor:
        """The product for silu(gate) * up, which is rounded to fp8 without being written."""
        from ..kernels.fp8_rows import quantise_rows  # noqa: PLC0415 - only where triton is installed

        return self.multiply(quantise_rows(gate_up_TE, swiglu=True), gate_up_TE.dtype)

    def multiply(self, x: "Fp8Rows", dtype: torch.dtype) -> Tensor:
        """The product of rows that are in fp8 already, in `dtype`; its rows may lie apart."""
        from ..kernels.fp8_linear import fp8_linear  # noqa: PLC0415 - only where triton is installed

        if len(x.values_TD) <= MOST_ROWS:
            return fp8_linear(x, self.weight_ED, self.scales, dtype)
        kind: Any = F.ScalingType  # pyright: ignore[reportPrivateImportUsage]
        multiply: Any = F.scaled_mm
        tokens, x = len(x.values_TD), x.padded(SCALES_AT_ONCE)
        product_TE: Tensor = multiply(
            x.values_TD,
            self._whole_ED.t(),
            x.scales_GT.t(),
            kind.BlockWise1x128,
            self._padded.t(),
            kind.BlockWise128x128,
            output_dtype=dtype,
        )
        return product_TE[:tokens, : len(self.weight_ED)]

    def pack(self) -> None:
        """Nothing to do: the layout of the checkpoint is the one that is multiplied."""
