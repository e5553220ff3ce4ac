"""Forms the steps: which requests compute how many tokens next, and who must give way for them.

Three rules make it free of dead-lock:

- A request enters only when pages for all its known tokens are available, and takes them at once,
  so a prompt that was begun can be finished. One page for each running request stays available at
  that moment, so the newcomer is not thrown out again by the next token of another.
- When a decode finds no page, the running request of the last rank gives its own back and is
  computed again later. The one of the first rank is never the victim of another, so it advances.
- No request may hold more tokens than all pages together, so that one alone always fits.

While the device works on a step of nothing but decodes, the step behind it can be formed already:
each request brings the one token that is being sampled. Only where that is all there is to do: who
must give way and who may enter is decided when all tokens are known.
"""

from ..configs.engine import SchedulerConfig
from ..kv_cache.cache import KvCache
from .batch import NOTHING, Step, Work
from .policy import ShortestFirst, rank_of
from .request import DECODE, EXTEND, Request, State
from .roster import Roster
from .speculative import Speculation
from .stats import Counters


class StepPlanner:
    """Steps of at most `config.max_num_batched_tokens` tokens; it admits and preempts for them."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: Roster,
        cache: KvCache,
        counters: Counters,
        max_tokens: int,
        speculation: Speculation,
    ) -> None:
        """`config` must be resolved, its budget cover every running request.

        max_tokens: what a request may hold, prompt and outputs together.
        """
        budget = config.max_num_batched_tokens
        if budget is None or budget < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least "
                f"max_num_seqs ({config.max_num_seqs})"
            )
        self._roster, self._cache, self._counters = roster, cache, counters
        self._running, self._queue = roster.running, roster.queue
        self._seats, self._budget = config.max_num_seqs, budget
        self._chunk = config.max_prefill_tokens or budget
        self._max_tokens = max_tokens
        self._speculation = speculation
        shortest = ShortestFirst(self._chunk).key
        self._order = shortest if config.prefill_order == "shortest" else rank_of
        # Rows that a request may have room for beyond its tokens, because a step was formed ahead.
        self.num_ahead = 0

    def plan(self) -> Step:
        """The next step: every decode, then prompt chunks as far as the budget goes.

        Beside decodes the chunks are bounded further, so that none of them waits for long.
        """
        self.num_ahead = 0
        decodes = self._decodes()
        widths = [work.num_tokens for work in decodes]
        budget = self._budget - sum(widths)
        extends = self._extends(min(budget, self._chunk) if decodes else budget)
        if len(set(widths)) > 1:
            width = max(widths)
            extends += [work for work in decodes if work.num_tokens < width]
            decodes = [work for work in decodes if work.num_tokens == width]
        return Step(extends + decodes, len(extends))

    def plan_behind(self, step: Step) -> Step:
        """The step after `step`, whose tokens are not known yet; nothing where they have to be.

        A request that ends with its token is in it all the same, unless that is by length: what it
        computes there is not taken.
        """
        running = [work.request for work in step.work if work.request.state is State.RUNNING]
        if self._speculation.reach or step.num_extends or len(running) < len(self._running):
            return NOTHING
        going_on = [
            (place, work)
            for place, work in enumerate(step.work)
            if work.request.state is State.RUNNING
            and not work.request.ends_with(1, self._max_tokens)
        ]
        if len(going_on) < len(running) and self._queue.head() is not None:
            return NOTHING
        if self._can_admit():
            return NOTHING
        self.num_ahead, works = 1, []
        for place, work in going_on:
            request, start = work.request, work.start + 1
            if start >= request.table.capacity and not self._cache.grow(request.table, start + 1):
                return NOTHING
            works.append(Work(request, start, 1, True, follows=place))
        return Step(works, 0)

    def preempt_last(self) -> Request:
        """Take seat and pages from the running request of the last rank; it is computed again."""
        victim = self._roster.preempt_last()
        self._cache.release(victim.table)
        self._counters.num_preemptions += 1
        return victim

    def _decodes(self) -> list[Work]:
        """The newest token of every decoding request, and its drafts, in the order of their ranks.

        Short pages cost the last one its run; drafts are only taken where there is room for them.

        Victims are taken from the end of the list that is walked from the front, so none of them
        has work in this step yet.
        """
        decoding = [request for request in self._running if request.phase is DECODE]
        drafts = self._speculation.propose(decoding, self._budget)
        reach, page_size = self._speculation.reach, self._cache.page_size
        works = []
        for request, guess in zip(decoding, drafts, strict=True):
            start = request.num_computed
            # Pages can only be full where the next one would begin; a victim holds none at all.
            if not start % page_size and start >= request.table.capacity:
                self._make_room(request)
                if request.state is not State.RUNNING:
                    break
            if not reach:
                works.append(Work(request, start, 1, True))
                continue
            draft_ids = guess[: self._room(request, start + 1, reach)]
            stop = start + 1 + len(draft_ids)
            ahead = self._num_to_draft(request, stop)
            works.append(Work(request, start, stop - start, True, draft_ids, ahead))
        return works

    def _room(self, request: Request, stop: int, num_rows: int) -> int:
        """Rows behind the first `stop` that guesses may be written to, at most `num_rows`.

        Pages are taken for them while each running request could still take one.
        """
        wanted = min(stop + num_rows, self._max_tokens)
        if wanted > request.table.capacity:
            self._cache.grow(request.table, wanted, spare=len(self._running))
        return max(0, min(wanted, request.table.capacity) - stop)

    def _num_to_draft(self, request: Request, stop: int) -> int:
        """Guesses that the model shall make for the next step; all but the first need a row."""
        ahead = self._speculation.num_ahead
        return ahead and 1 + self._room(request, stop, ahead - 1)

    def _make_room(self, request: Request) -> None:
        """Find a page for the next token, unless `request` itself has to give way, or had to."""
        while request.state is State.RUNNING and not self._cache.grow(
            request.table, request.num_tokens
        ):
            self.preempt_last()

    def _extends(self, budget: int) -> list[Work]:
        """Prompt chunks of the requests under way and of those that can start, in turn."""
        under_way = sorted((r for r in self._running if r.phase is EXTEND), key=self._order)
        works: list[Work] = []
        head = self._queue.head()
        while budget > 0 and (head is not None or under_way):
            if head is None or (under_way and self._order(under_way[0]) < self._order(head)):
                works.append(self._extend(under_way.pop(0), budget))
            elif not self._admit(head):
                head = None
                continue
            else:
                works.append(self._extend(head, budget))
                head = self._queue.head()
            budget -= works[-1].num_tokens
        return works

    def _admit(self, request: Request) -> bool:
        """Start the request at the head of the queue if a seat and its pages are free."""
        if len(self._running) >= self._seats:
            return False
        is_first = not request.has_run
        reads = not request.wants_prompt_scores
        cached = self._cache.admit(
            request.table, request.tokens, request.num_tokens, len(self._running), reads
        )
        if cached is None:
            return False
        self._roster.start(request, cached)
        if is_first and reads and request.table.chain is not None:
            self._counters.num_prefix_queries += request.num_tokens
            self._counters.num_prefix_hits += cached
        return True

    def _can_admit(self) -> bool:
        """Whether `_admit` would start the request at the head of the queue."""
        head = self._queue.head()
        if head is None or len(self._running) >= self._seats:
            return False
        reads = not head.wants_prompt_scores
        return self._cache.has_room(
            head.table, head.tokens, head.num_tokens, len(self._running), reads
        )

    def _extend(self, request: Request, budget: int) -> Work:
        """The next chunk of an extending request, of at most `budget` tokens."""
        start = request.num_computed
        size = min(request.num_tokens - start, budget)
        samples = start + size == request.num_tokens and request.params.max_tokens > 0
        ahead = self._num_to_draft(request, start + size) if samples else 0
        return Work(request, start, size, samples, (), ahead)
