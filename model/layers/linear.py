"""Where weights are allocated and multiplied.

Every weight is born in an `Allocator`, once, at its final place: fused projections are one tensor
that the loader fills slice by slice. A `Linear` may then be packed for the processor.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fp8 import BLOCK
from .fp8 import Fp8Linear
from .products import agrees, gather, multiply, pack, packs

# `gather` reads the weight once for each row of x. Up to so many elements in all that costs less
# than a call of `multiply` does.
CHEAP_TO_GATHER = 200_000
# Steps of up to so many tokens take the same operations, those of one token their own.
SMALL_STEP = 32


@dataclass(frozen=True)
class Allocator:
    """Makes uninitialised weights; on the `meta` device they have shapes and no memory."""

    dtype: torch.dtype
    device: torch.device
    keeps_fp8: bool = False  # weights that are stored in fp8 stay so where a product takes them
    linears: "list[Linear | Fp8Linear]" = field(default_factory=list)

    def weight(self, *shape: int) -> Tensor:
        """A weight in the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear(self, rows: int, columns: int) -> "Linear":
        """A product with a weight [rows, columns] in the model's dtype."""
        made = Linear(self.weight(rows, columns))
        self.linears.append(made)
        return made

    def fp8_linear(self, *parts: int, columns: int, in_blocks: bool = True) -> "Linear | Fp8Linear":
        """A product that takes its weight in fp8 if `keeps_fp8`.

        parts: rows of the checkpoint's tensors that stand below each other. in_blocks: whether each
        row stays in its block of the checkpoint, if it is not reordered beyond that. Where one does
        not, or a tensor begins within a block, the weight is a plain one.
        """
        rows, fits = sum(parts), not any(size % BLOCK for size in (columns, *parts[:-1]))
        if not (self.keeps_fp8 and in_blocks and fits):
            return self.linear(rows, columns)
        made = Fp8Linear(rows, columns, self.device)
        self.linears.append(made)
        return made

    def experts(self, count: int, rows: int, columns: int) -> Tensor:
        """Weights [count, rows, columns] of as many experts, in the model's dtype.

        On a CPU their memory runs along the rows: a single token times a matrix then reads memory
        twice as fast (22 GB/s instead of 11 on two EPYC cores), many tokens no slower.
        """
        if self.device.type != "cpu":
            return self.weight(count, rows, columns)
        return self.weight(count, columns, rows).transpose(1, 2)

    def fp32(self, *shape: int) -> Tensor:
        """A weight that stays in fp32 whatever the model's dtype."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)


class Linear:
    """x [T, D] times the transpose of a weight [E, D]: [T, E].

    weight_ED is what the loader fills; it is empty once the product is packed.
    """

    def __init__(self, weight_ED: Tensor) -> None:
        self.weight_ED = weight_ED
        self._packed: Tensor | None = None
        self._few: FewRows | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self._few is not None and len(x_TD) <= self._few.most:
            return self._few(x_TD)
        if self._packed is not None:
            return multiply(x_TD, self._packed)
        return F.linear(x_TD, self.weight_ED)

    def pack(self) -> None:
        """Move the weight into the layouts of `products`, if this is fp32 on a CPU with oneDNN.

        The bits of a row then do not depend on how many rows there are. Two to three times faster
        than the default BLAS from two rows on (AMD EPYC). A weight of few columns is kept twice.
        """
        weight_ED = self.weight_ED
        if not len(weight_ED) or not packs(weight_ED):
            return
        if agrees(*weight_ED.shape):
            self._few = FewRows(weight_ED)
        self._packed = pack(weight_ED)
        self.release()

    def release(self) -> Tensor:
        """The weight, which is empty here from now on: another product takes it over."""
        weight_ED = self.weight_ED
        self.weight_ED = weight_ED.new_empty(0, weight_ED.shape[1])
        return weight_ED


class FewRows:
    """The product of at least one and at most `most` rows by `products.gather`.

    `most` is 1, or at least SMALL_STEP: a recording serves steps of any number of rows between.
    """

    def __init__(self, weight_ED: Tensor) -> None:
        columns = weight_ED.shape[1]
        cheap = CHEAP_TO_GATHER // weight_ED.numel()
        self.most = cheap if cheap >= SMALL_STEP else 1
        self._table_DE = weight_ED.t().contiguous()
        self._rows_P = torch.arange(columns).repeat(self.most)
        self._starts_T = torch.arange(self.most) * columns
        # Cutting these in a step would cost half as much as the product of one row.
        self._alone = self._rows_P[:columns], self._starts_T[:1]

    def __call__(self, x_TD: Tensor) -> Tensor:
        if len(x_TD) == 1:
            return gather(x_TD, self._table_DE, *self._alone)
        # A number from the shape stays open in a recording.
        count, columns = x_TD.shape
        rows_P = self._rows_P.narrow(0, 0, count * columns)
        return gather(x_TD, self._table_DE, rows_P, self._starts_T.narrow(0, 0, count))
