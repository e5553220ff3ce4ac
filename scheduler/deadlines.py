"""When a request has waited, or has taken, long enough.

Times are of a monotonic clock, so nothing happens to anybody when the wall clock is set.
"""

import heapq
from collections.abc import Callable, Iterator

from .request import Request, State

WAITED_TOO_LONG = "the request waited too long to be run"


class Deadlines:
    """Alarms of requests, the earliest first; what rings for a finished request is dropped.

    queue_timeout: seconds in which a request must have started; None for no such bound.
    """

    def __init__(self, queue_timeout: float | None, clock: Callable[[], float]) -> None:
        self._queue_timeout = queue_timeout
        self._clock = clock
        self._alarms: list[tuple[float, int, Request, bool]] = []
        self._num_set = 0

    def watch(self, request: Request, seconds: float | None) -> None:
        """Bound the time of a request from now on, all of it by `seconds` where given."""
        for limit, covers_run in ((self._queue_timeout, False), (seconds, True)):
            if limit is not None:
                self._num_set += 1
                alarm = (self._clock() + limit, self._num_set, request, covers_run)
                heapq.heappush(self._alarms, alarm)

    def due(self) -> Iterator[Request]:
        """Requests whose time is over."""
        while self._alarms and self._alarms[0][0] <= self._clock():
            _, _, request, covers_run = heapq.heappop(self._alarms)
            is_alive = request.state is not State.FINISHED
            if is_alive and (covers_run or not request.has_run):
                yield request
