"""Who goes next: first come, first served, and nobody overtakes.

Preempted requests resume before anything new is admitted, the longest-waiting first. Every request
that ever ran arrived before every one that did not, so the two lists together are ordered by age.
A request at the head that does not fit yet holds the others back: that is what keeps it from
starving.
"""

from bisect import insort
from collections import deque

from .request import Request, State


def age(request: Request) -> int:
    """Sort key: the oldest request first."""
    return request.arrival


class FcfsQueue:
    """Requests that hold no pages: preempted ones in order of age, then the new ones."""

    def __init__(self) -> None:
        self._preempted: list[Request] = []
        self._waiting: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request: behind all others if it is new, by its age if it was preempted."""
        if request.state is State.PREEMPTED:
            insort(self._preempted, request, key=age)
        else:
            self._waiting.append(request)

    def head(self) -> Request | None:
        """The next request to run."""
        if self._preempted:
            return self._preempted[0]
        return self._waiting[0] if self._waiting else None

    def pop(self) -> Request:
        """Take the head out; raises IndexError when the queue is empty."""
        return self._preempted.pop(0) if self._preempted else self._waiting.popleft()

    def remove(self, request: Request) -> None:
        """Take a request out from anywhere; raises ValueError if it is not here."""
        if request.state is State.PREEMPTED:
            self._preempted.remove(request)
        else:
            self._waiting.remove(request)
