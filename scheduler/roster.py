"""Every request in the engine, in exactly one place: running or waiting, each in order of rank."""

from bisect import insort

from .messages import FinishReason, Handling
from .policy import RankedQueue, Ranking, rank_of
from .request import Rank, Request, State


class Roster:
    """`alive` by id; `running` hold pages, those in `queue` none."""

    def __init__(self) -> None:
        self.alive: dict[str, Request] = {}
        self.running: list[Request] = []
        self.queue = RankedQueue()
        self._ranking = Ranking()

    def next_rank(self, handling: Handling) -> Rank:
        """The rank of a request that arrives now."""
        return self._ranking.assign(handling)

    def add(self, request: Request) -> None:
        """Take in a new request, which waits."""
        self.alive[request.request_id] = request
        self.queue.add(request)

    def start(self, request: Request, num_cached: int) -> None:
        """Let a waiting request run; its first `num_cached` rows are there already."""
        self.queue.remove(request)
        request.admit(num_cached)
        self._ranking.serve(request.rank)
        insort(self.running, request, key=rank_of)

    def preempt_last(self) -> Request:
        """Let the running request of the last rank wait again; the caller takes its pages."""
        victim = self.running.pop()
        victim.preempt()
        self.queue.add(victim)
        return victim

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Forget a request wherever it stands; the caller takes its pages."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        else:
            self.queue.remove(request)
        request.finish(reason)
        del self.alive[request.request_id]

    def check(self) -> None:
        """Raise RuntimeError unless each request stands in one place and in order."""
        running = [r for r in self.alive.values() if r.state is State.RUNNING]
        others = [r for r in self.alive.values() if r.state is not State.RUNNING]
        if len(running) != len(self.running) or len(others) != len(self.queue):
            raise RuntimeError("a request is lost or stands in two places")
        if self.running != sorted(running, key=rank_of) or (
            others and self.queue.head() is not min(others, key=rank_of)
        ):
            raise RuntimeError("a request overtook one of a better rank")
