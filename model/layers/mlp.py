"""The plain feed-forward block: down(silu(gate(x)) * up(x))."""

import torch.nn.functional as F
from torch import Tensor

from .elementwise import rows_below
from .linear import Allocator


class Mlp:
    """gate_up holds the gate's rows first, then the rows of up."""

    def __init__(self, hidden: int, width: int, allocate: Allocator) -> None:
        self.gate_up = allocate.fp8_linear(2 * width, hidden, parts=2)
        self.down = allocate.fp8_linear(hidden, width)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(silu_product(self.gate_up(x_TD)))


def silu_product(gate_up_TE: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half; overwrites the first."""
    gate_TE, up_TE = gate_up_TE.chunk(2, dim=-1)
    for rows in rows_below(gate_TE):
        F.silu(gate_TE[rows], inplace=True)
    return gate_TE * up_TE
