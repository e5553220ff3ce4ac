"""Products with a weight on a CPU that give a row the same bits among any number of rows.

Both ways sum an output element as one chain of fused multiply-adds, from the first column to the
last, so they agree to the last bit:

- `multiply`: oneDNN with a weight in oneDNN's own layout. Fast for many rows, but a call costs as
  much as reading 200 kB.
- `gather`: torch's embedding bag over the transposed weight, whose rows are summed with the
  elements of x as their weights. A call costs little, and it can name the matrix of each row of x,
  which is what experts need; but every row of x reads its matrix again.

A longer sum than LONGEST_CHAIN is cut by oneDNN and stays a matter of `multiply` alone.
"""

import functools

import torch
from torch import Tensor

LONGEST_CHAIN = 512
# oneDNN cuts a longer sum of a single row in other places than one of several (AVX-512).
SAME_ALONE_UP_TO = 1024


def packs(weight: Tensor) -> bool:
    """Whether `pack` has a layout for such a weight: fp32 on a CPU that has oneDNN."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available()


def pack(weight_ED: Tensor) -> Tensor:
    """A weight [E, D] in oneDNN's layout, for `multiply` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_ED)


def multiply(x_TD: Tensor, packed: Tensor) -> Tensor:
    """x times the transpose of a packed weight [E, D]: [T, E]."""
    if len(x_TD) == 1 and x_TD.shape[1] > SAME_ALONE_UP_TO:
        return multiply(x_TD.expand(2, -1), packed)[:1]
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        # A recording takes no list of scalars. Adding zeros at the end changes the sign of a zero.
        zeros_TE = x_TD.new_zeros(x_TD.shape[0], packed.shape[0])
        return torch.ops.mkldnn._linear_pointwise.binary(x_TD, zeros_TE, packed, None, "add")
    return torch.ops.mkldnn._linear_pointwise.default(x_TD, packed, None, "none", [], "")


def gather(x_TD: Tensor, table_XE: Tensor, rows_P: Tensor, starts_T: Tensor) -> Tensor:
    """sum_d x[t, d] * table[rows[t * D + d]]: [T, E].

    table_XE: transposed weights below each other. rows_P: int64 rows of the table for the P = T * D
    elements of x. starts_T: int64, where the rows of each t begin: t * D.
    """
    elements_P = x_TD.reshape(-1)
    return torch.embedding_bag(table_XE, rows_P, starts_T, False, 0, False, elements_P)[0]


@functools.cache
def agrees(rows: int, columns: int) -> bool:
    """Whether `gather` gives this machine's bits of `multiply` for weights [rows, columns]."""
    if columns > LONGEST_CHAIN:
        return False
    generator = torch.Generator().manual_seed(0)
    weight_ED = torch.randn(rows, columns, generator=generator)
    x_TD = torch.randn(8, columns, generator=generator)
    rows_P = torch.arange(columns).repeat(8)
    gathered = gather(x_TD, weight_ED.t().contiguous(), rows_P, torch.arange(8) * columns)
    packed = pack(weight_ED)
    return all(torch.equal(gathered[:n], multiply(x_TD[:n], packed)) for n in (1, 2, 8))
