"""The plain feed-forward block: down(silu(gate(x)) * up(x))."""

from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from .elementwise import by_rows
from .fp8 import Fp8Linear
from .linear import Allocator

if TYPE_CHECKING:
    from ..kernels.fp8_rows import Fp8Rows


class Mlp:
    """gate_up holds the gate's rows first, then the rows of up."""

    def __init__(self, hidden: int, width: int, allocate: Allocator) -> None:
        self.gate_up = allocate.fp8_linear(width, width, columns=hidden)
        self.down = allocate.fp8_linear(hidden, columns=width)

    @property
    def takes_fp8(self) -> bool:
        return isinstance(self.gate_up, Fp8Linear)

    def __call__(self, x_TD: Tensor, rows: "Fp8Rows | None" = None) -> Tensor:
        """rows: x in fp8, where a product takes it so and it was made already."""
        if rows is not None and isinstance(self.gate_up, Fp8Linear):
            gate_up_TE = self.gate_up.multiply(rows, x_TD.dtype)
        else:
            gate_up_TE = self.gate_up(x_TD)
        if isinstance(self.down, Fp8Linear):
            return self.down.of_silu_product(gate_up_TE)
        return self.down(silu_product(gate_up_TE))


def silu_product(gate_up_TE: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half; overwrites the first."""
    gate_TE, up_TE = gate_up_TE.chunk(2, dim=-1)
    by_rows(partial(F.silu, inplace=True), gate_TE)
    return gate_TE * up_TE
