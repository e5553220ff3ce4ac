"""How many drafts each step verifies, and what becomes of them.

A step with k drafts a request computes k + 1 rows instead of one and yields between 1 and k + 1
tokens. Rejected drafts leave nothing behind: the committed length does not advance over their
rows, and the next step writes there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .batch import Work
from .drafters import Drafter
from .request import Request

MOST_DRAFTS = 7
# Verifying must not starve the prompts of others.
SHARE_OF_BUDGET = 0.5


@dataclass
class DraftCounters:
    """num_drafts: verify passes, each of one request. accepted_at[i]: times that draft i was
    accepted."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_at[position] += 1


class Speculation:
    """Drafts of at most `num_tokens` a request and step.

    num_ahead: tokens that the model itself proposes for the next step, which need cache rows.
    """

    def __init__(self, drafter: Drafter, num_tokens: int, num_ahead: int) -> None:
        if not 0 <= num_tokens <= MOST_DRAFTS:
            raise ValueError(f"num_tokens is {num_tokens}; it must be from 0 to {MOST_DRAFTS}")
        self.num_tokens = num_tokens
        self.num_ahead = num_ahead
        self.counters = DraftCounters()
        self._drafter = drafter

    @property
    def reach(self) -> int:
        """Rows behind the newest token that one step may write: its drafts, and those ahead."""
        return self.num_tokens + max(0, self.num_ahead - 1)

    def propose(self, decoding: Sequence[Request], budget: int) -> list[Sequence[int]]:
        """Drafts of each request: none at all, or as many for one as for the other.

        budget: tokens of a step. Where one has fewer guesses than others, its newest token stands
        in for the missing ones, because a step verifies equally many rows of all.
        """
        share = int(budget * SHARE_OF_BUDGET) // max(1, len(decoding)) - 1
        most = min(self.num_tokens, share)
        if most < 1:
            return [()] * len(decoding)
        proposals = [self._drafter.propose(request, most) for request in decoding]
        longest = max(map(len, proposals), default=0)
        return [
            [*guess, *list(request.newest) * (longest - len(guess))]
            for request, guess in zip(decoding, proposals, strict=True)
        ]

    def count(self, work: Work, num_accepted: int) -> None:
        """Book one verify pass, if this was one."""
        if work.draft_ids:
            self.counters.count(len(work.draft_ids), num_accepted)
            work.request.num_drafted += len(work.draft_ids)
            work.request.num_accepted += num_accepted
