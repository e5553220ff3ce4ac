"""Tokens that the device is choosing: the next step reads them there before the host has seen them.

Their copy on the host is pinned memory of its own for each step, so that the next step, which is
under way when this one's tokens are read, writes elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .sequence import NON_FINITE, SequenceOutput


@dataclass(frozen=True)
class Followed:
    """Some tokens of the step before, by their places in it. ids_N: on the device; -1 is none."""

    ids_N: Tensor
    places: Sequence[int]


@dataclass(frozen=True)
class Choosing:
    """See `sequence.Started`: one token a request, int64, -1 where a logit is not finite.

    ids_N: on the device, until the next step is replayed. host_N: their copy, there once `arrived`.
    """

    ids_N: Tensor
    host_N: Tensor
    arrived: torch.cuda.Event | None
    leads: bool = True

    @classmethod
    def of(cls, ids_N: Tensor) -> Self:
        """Begin to copy them to the host, waiting for nothing."""
        is_cuda = ids_N.is_cuda
        host_N = torch.empty(len(ids_N), dtype=torch.int64, pin_memory=is_cuda)
        host_N.copy_(ids_N, non_blocking=True)
        arrived = torch.cuda.Event() if is_cuda else None
        if arrived is not None:
            arrived.record()
        return cls(ids_N, host_N, arrived)

    def rows(self, places: Sequence[int]) -> Followed:
        """What the next step computes."""
        return Followed(self.ids_N, places)

    def ids(self) -> list[int]:
        """Wait for this step alone, not for what was given to the device behind it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host_N.tolist()

    def outputs(self) -> list[SequenceOutput]:
        return [
            SequenceOutput([token]) if token >= 0 else SequenceOutput(error=NON_FINITE)
            for token in self.ids()
        ]
