"""Elementwise functions whose result for a row does not depend on the rows beside it.

On a CPU torch computes the last elements of a stretch, those that do not fill two vectors, with
scalar code, and that rounds exp and complex products differently. A stretch is a row where the row
is a part of a wider one; but from 2^15 elements on threads share an operation, and cut it anywhere.
"""

from collections.abc import Callable

from torch import Tensor

SHARED_FROM = 1 << 15


def by_rows(operation: Callable[..., object], x: Tensor, *beside: Tensor) -> None:
    """Call an operation in place on x [T, ...], in slices so small that no thread shares one.

    x is a part of wider rows: rows that lie end to end would be one stretch. beside: further
    arguments of as many rows.
    """
    if x.numel() < SHARED_FROM or x.device.type != "cpu":
        operation(x, *beside)
        return
    count = len(x)
    step = max(1, (SHARED_FROM - 1) * count // x.numel())
    for first in range(0, count, step):
        rows = slice(first, first + step)
        operation(x[rows], *(other[rows] for other in beside))
