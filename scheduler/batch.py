"""A step: which requests compute how many tokens together.

A prompt chunk and a decode token differ only in how many tokens they bring and in whether they want
a token sampled, so one list describes any mixture of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .request import Request


class Work(NamedTuple):
    """One request's part of a step: its tokens start..start+num_tokens-1.

    `samples` says whether the last of them is the request's newest token, so that the next one is
    chosen from its logits.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Extends first, decodes after; false when there is nothing to compute."""

    work: list[Work]
    num_extends: int

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)

    def halves(self) -> list["Step"]:
        """Two steps that do the same together; one of a single work stays as it is."""
        cut, extends = len(self.work) // 2, self.num_extends
        if not cut:
            return [self]
        return [
            Step(self.work[:cut], min(extends, cut)),
            Step(self.work[cut:], max(extends - cut, 0)),
        ]

    def __bool__(self) -> bool:
        return bool(self.work)
