"""Who goes next: turns for tenants, places for priorities, and no way to starve.

A request gets its rank when it arrives, and keeps it. Each tenant's requests take turns that grow
by one, from the turn that was served last (self-clocked fair queueing, Golestani 1994): with one
tenant that is first come, first served; a tenant that sends a hundred at once waits behind the
first ones of others. A level of priority is worth a number of turns. So a request can be overtaken
by a bounded number of later ones only, whatever they are.

Waiting requests start in the order of their ranks, preempted ones among them. A request at the head
that does not fit yet holds the others back: that is what keeps it from starving.
"""

from bisect import bisect_left, insort

from .messages import Handling
from .request import Rank, Request

TURNS_A_LEVEL = 32
"""A request of priority -1 is served as if it had come 32 requests of its tenant earlier."""


def rank_of(request: Request) -> Rank:
    """Sort key: who goes first."""
    return request.rank


class Ranking:
    """Hands out ranks."""

    def __init__(self) -> None:
        self._served = 0
        self._arrivals = 0
        self._last_turn: dict[str, int] = {}

    def assign(self, handling: Handling) -> Rank:
        """The rank of a request that arrives now."""
        turn = max(self._served, self._last_turn.get(handling.tenant, 0)) + 1
        self._last_turn[handling.tenant] = turn
        self._arrivals += 1
        return Rank(turn + handling.priority * TURNS_A_LEVEL, self._arrivals, turn)

    def serve(self, rank: Rank) -> None:
        """A request of this rank starts to run."""
        self._served = max(self._served, rank.turn)


class RankedQueue:
    """Requests that hold no pages, new and preempted ones, in the order of their ranks."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=rank_of)

    def head(self) -> Request | None:
        """The next request to run."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Take a request out from anywhere; raises ValueError if it is not here."""
        index = bisect_left(self._requests, request.rank, key=rank_of)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} does not wait")
        del self._requests[index]


class ShortestFirst:
    """The order in which prompts share what a step has left: the least work first, with ageing.

    A prompt that has waited since an earlier step counts as one chunk shorter for each step since,
    so a long one is computed after a bounded number of short ones.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def key(self, request: Request) -> tuple[int, Rank]:
        """Sort key: the prompt to compute first."""
        remaining = request.num_tokens - request.num_computed
        return remaining + self._chunk * request.since_step, request.rank
