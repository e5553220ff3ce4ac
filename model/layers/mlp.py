"""The plain feed-forward block: down(silu(gate(x)) * up(x))."""

import torch.nn.functional as F
from torch import Tensor

from .linear import Allocator


class Mlp:
    """gate_up holds the gate's rows first, then the rows of up."""

    def __init__(self, hidden: int, width: int, allocate: Allocator) -> None:
        self.gate_up = allocate.linear(2 * width, hidden)
        self.down = allocate.linear(hidden, width)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(silu_product(self.gate_up(x_TD)))


def silu_product(gate_up_TE: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half."""
    gate_TE, up_TE = gate_up_TE.chunk(2, dim=-1)
    return F.silu(gate_TE).mul_(up_TE)
