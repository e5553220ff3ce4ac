"""How many drafts each step verifies, and what becomes of them.

A step with k drafts a request computes k + 1 rows instead of one and yields between 1 and k + 1
tokens. Rejected drafts leave nothing behind: the committed length does not advance over their
rows, and the next step writes there.
"""

from collections.abc import Sequence
from typing import Literal

from .batch import Step
from .draft_length import DraftLength
from .drafters import Drafter, ModelDrafter, NgramDrafter
from .messages import DraftStats
from .request import Request

MOST_DRAFTS = 7
# Verifying must not starve the prompts of others.
SHARE_OF_BUDGET = 0.5


class Speculation:
    """Drafts of at most `most` tokens a request and step.

    `length` is how many the step in the making verifies, and how many the model then proposes.
    """

    def __init__(
        self, drafter: Drafter, most: int, *, from_model: bool, adaptive: bool = True
    ) -> None:
        """most: 0 drafts nothing. from_model: the runner makes the guesses, a step before.

        Raises ValueError for more drafts than a step can verify.
        """
        if not 0 <= most <= MOST_DRAFTS:
            raise ValueError(f"num_tokens is {most}; it must be from 0 to {MOST_DRAFTS}")
        self.length = most
        self._lengths = DraftLength(most, adaptive=adaptive)
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted_at = [0] * most
        self._from_model = from_model
        self._drafter = drafter

    @property
    def num_ahead(self) -> int:
        """Guesses that the model makes at the end of a step; all but the first need a row."""
        return self.length if self._from_model else 0

    @property
    def reach(self) -> int:
        """Rows behind the newest token that a step may write: its drafts, and those ahead."""
        most = self._lengths.most
        return most + (max(0, most - 1) if self._from_model else 0)

    def propose(self, decoding: Sequence[Request], budget: int) -> list[Sequence[int]]:
        """Drafts of each request: none at all, or as many for one as for the other.

        budget: tokens of a step. Where one has fewer guesses than others, its newest token stands
        in for the missing ones, because a step verifies equally many rows of all.
        """
        if not self._lengths.most:
            return [()] * len(decoding)
        # Behind a step without decodes comes one with those that its prompts become.
        num_requests = max(1, len(decoding))
        share = int(budget * SHARE_OF_BUDGET) // num_requests - 1
        self.length = max(0, min(self._lengths.choose(num_requests), share))
        if not self.length:
            return [()] * len(decoding)
        proposals = [self._drafter.propose(request, self.length) for request in decoding]
        longest = max(map(len, proposals), default=0)
        return [
            [*guess, *list(request.newest) * (longest - len(guess))]
            for request, guess in zip(decoding, proposals, strict=True)
        ]

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Book the verify pass of one request."""
        self._lengths.observe_acceptance(num_drafts, num_accepted)
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for position in range(num_accepted):
            self._accepted_at[position] += 1

    def stats(self) -> DraftStats | None:
        """Counters and the length of now; None where nothing is ever drafted."""
        if not self._lengths.most:
            return None
        return DraftStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._accepted_at),
            accepted_at=list(self._accepted_at),
            length=self.length,
        )

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from the time of a step that did nothing but verify, all requests alike."""
        if self._lengths.most and step.work and not step.num_extends:
            drafts = {len(work.draft_ids) for work in step.work}
            ahead = {work.num_to_draft for work in step.work} if self._from_model else drafts
            if len(drafts | ahead) == 1:
                self._lengths.observe_time(len(step.work), drafts.pop(), seconds)


def new_speculation(
    method: Literal["none", "mtp", "ngram"], most: int = 0, *, adaptive: bool = True
) -> Speculation:
    """Speculation by the name of its drafter."""
    drafter = NgramDrafter() if method == "ngram" else ModelDrafter()
    most = 0 if method == "none" else most
    return Speculation(drafter, most, from_model=method == "mtp", adaptive=adaptive)
