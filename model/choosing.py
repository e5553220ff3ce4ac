"""Tokens that the device is choosing: the next step reads them there before the host has seen them.

Their copy on the host is pinned memory of its own for each step, so that the next step, which is
under way when this one's tokens are read, writes elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ..configs.logprobs import TokenLogprobs
from .inputs import Arriving
from .logprobs import Scores
from .sampler import choose
from .sequence import SampleInput


@dataclass(frozen=True)
class Followed:
    """Some tokens of the step before, by their places in it. ids_N: on the device; -1 is none."""

    ids_N: Tensor
    places: Sequence[int]


@dataclass(frozen=True)
class Choosing:
    """One token a row, int64, -1 where a logit is not finite, and scores where they are asked for.

    ids_N: on the device, until the next step is replayed.
    """

    ids_N: Tensor
    host_N: Arriving
    asked: Scores | None = None

    @classmethod
    def of(cls, ids_N: Tensor) -> Self:
        """Begin to copy them to the host, waiting for nothing."""
        return cls(ids_N, Arriving(ids_N))

    @classmethod
    def among(cls, logits_NV: Tensor, rows: Sequence[SampleInput]) -> Self:
        """Begin to choose the token of each row; logits_NV: fp32, the model's own."""
        ids_N = choose(logits_NV, rows)
        tops = {i: n for i, row in enumerate(rows) if (n := row.params.logprobs) is not None}
        scores = Scores.of(logits_NV, ids_N, tops) if tops else None
        return cls(ids_N, Arriving(ids_N), scores)

    def ids(self) -> list[int]:
        """Wait for this step alone, not for what was given to the device behind it."""
        return self.host_N.wait().tolist()

    def scores(self) -> dict[int, TokenLogprobs]:
        """Those of the rows that ask for them, by their places; waits as `ids` does."""
        return {} if self.asked is None else self.asked.read()
