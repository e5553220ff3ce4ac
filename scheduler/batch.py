"""A step: which requests compute how many tokens together.

A prompt chunk, a decode token and the k + 1 tokens of a verify step differ only in how many tokens
they bring and in which of them want a token sampled, so one list describes any mixture of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .request import Request, State


class Work(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: its tokens start..start+num_tokens-1.

    `samples` says whether the request's newest token is among them, so that the next one is chosen
    from its logits; `draft_ids`, guesses at the tokens behind it, are then the last ones computed.
    `num_to_draft` guesses are wanted for the next step. `follows`: the place of the request in the
    step before, whose token, the only one here, need not be known when this is started. Every token
    costs one of these, hence the Struct: it is made in half the time of a named tuple.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    draft_ids: Sequence[int] = ()
    num_to_draft: int = 0
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Extends first, decodes after; false when there is nothing to compute.

    Decodes bring equally many tokens each. One that can take fewer drafts than the others stands
    among the extends.
    """

    work: list[Work]
    num_extends: int

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)

    @property
    def is_wanted(self) -> bool:
        """Whether any of its requests still runs."""
        return any(work.request.state is State.RUNNING for work in self.work)

    def of_running(self) -> "Step":
        """The same without requests that have ended since."""
        extends, decodes = (
            [work for work in part if work.request.state is State.RUNNING]
            for part in (self.work[: self.num_extends], self.work[self.num_extends :])
        )
        return Step(extends + decodes, len(extends))

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


NOTHING = Step([], 0)
