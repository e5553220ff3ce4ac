"""The plain feed-forward block: down(silu(gate(x)) * up(x))."""

import torch.nn.functional as F
from torch import Tensor

from .linear import Allocator, linear


class Mlp:
    """gate_up_ED holds the gate's rows first, then the rows of up."""

    def __init__(self, hidden: int, width: int, allocate: Allocator) -> None:
        self.gate_up_ED = allocate.matrix(2 * width, hidden)
        self.down_DE = allocate.matrix(hidden, width)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return linear(silu_product(linear(x_TD, self.gate_up_ED)), self.down_DE)


def silu_product(gate_up_TE: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half."""
    gate_TE, up_TE = gate_up_TE.chunk(2, dim=-1)
    return F.silu(gate_TE).mul_(up_TE)
