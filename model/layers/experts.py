"""The experts of a mixture on a CPU, with products that give a token the same bits in any company.

Few tokens gather the rows of their own experts' weights, all experts in one operation; many are
sorted by expert, so that each expert's weight is read once.
"""

import torch
from torch import Tensor

from .mlp import silu_product
from .products import agrees, gather, multiply, pack

# Sorting pays from about so many tokens an expert on (measured with 17 experts, 5 of them chosen).
MANY = 16


class PackedExperts:
    """X experts: gate_up_XED (gate rows, then up rows) and down_XDE, fp32 on a CPU.

    The memory of both runs along their second dimension, as `Allocator.experts` lays it out.
    """

    def __init__(self, gate_up_XED: Tensor, down_XDE: Tensor) -> None:
        self._gate_ups = [pack(gate_up_ED.contiguous()) for gate_up_ED in gate_up_XED]
        self._downs = [pack(down_DE.contiguous()) for down_DE in down_XDE]
        self._tables: tuple[Table, Table] | None = None
        if agrees(*gate_up_XED.shape[1:]) and agrees(*down_XDE.shape[1:]):
            self._tables = Table(gate_up_XED), Table(down_XDE)

    @property
    def most_gathered(self) -> int:
        """Pairs of a token and an expert up to which operations depend on nothing else."""
        return MANY * len(self._downs) - 1 if self._tables is not None else 0

    def __call__(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        """The output of every chosen expert, [T, K, D]."""
        tokens, chosen = ids_TK.shape
        ids_P = ids_TK.flatten()
        if self._tables is not None and len(ids_P) <= self.most_gathered:
            gate_up, down = self._tables
            rows_TKD = x_TD.unsqueeze(1).expand(-1, chosen, -1)
            out_PD = down(silu_product(gate_up(rows_TKD, ids_P)), ids_P)
        else:
            out_PD = self._sorted(x_TD, ids_P, chosen)
        return out_PD.view(tokens, chosen, -1)

    def _sorted(self, x_TD: Tensor, ids_P: Tensor, chosen: int) -> Tensor:
        """The same, each expert's rows together: [P, D] in the order of the pairs."""
        order_P = ids_P.argsort(stable=True)
        counts = torch.bincount(ids_P, minlength=len(self._downs)).tolist()
        rows = x_TD.index_select(0, order_P // chosen).split(counts)
        busy = [expert for expert, count in enumerate(counts) if count]
        middle_PE = torch.cat([multiply(rows[expert], self._gate_ups[expert]) for expert in busy])
        hidden = silu_product(middle_PE).split(counts)
        out_PD = torch.cat([multiply(hidden[expert], self._downs[expert]) for expert in busy])
        # Twice as fast as `index_copy_` of the rows themselves.
        places_P = torch.empty_like(order_P)
        places_P[order_P] = torch.arange(len(order_P))
        return out_PD.index_select(0, places_P)


class Table:
    """The weights [X, E, D] of X experts as one table, for `products.gather`."""

    def __init__(self, weight_XED: Tensor) -> None:
        experts, _, columns = weight_XED.shape
        self._table_XE = weight_XED.transpose(1, 2).flatten(0, 1)
        self._rows_XD = torch.arange(experts * columns).view(experts, columns)
        self._starts_P = torch.arange(MANY * experts) * columns

    def __call__(self, x: Tensor, ids_P: Tensor) -> Tensor:
        """P rows x [..., D], each times the weight of its own expert: [P, E]."""
        rows_P = self._rows_XD.index_select(0, ids_P).view(-1)
        return gather(x, self._table_XE, rows_P, self._starts_P.narrow(0, 0, ids_P.shape[0]))
