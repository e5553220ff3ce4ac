"""Decides what the next step computes, and keeps the books of requests and pages.

Pure bookkeeping on lists and integers, without tensors. Three rules make it free of dead-lock:

- A request enters only when pages for all its known tokens are free, and takes them at once, so a
  prompt that was begun can be finished. One page for each running request stays free at that
  moment, so the newcomer is not thrown out again by the next token of an older one.
- When a decode finds no page, the youngest running request gives its own back and is computed again
  later. The oldest is never the victim of another, so it always advances.
- No request may hold more tokens than all pages together, so the oldest alone always fits. One that
  was meant to be longer finishes with "length" there.
"""

from collections.abc import Sequence

from ..configs.engine import SchedulerConfig
from ..kv_cache.cache import KvCache
from ..model.sequence import SequenceOutput
from .admission import DuplicateId, Limits, Overloaded, matcher_of
from .batch import Step, Work
from .grammar import GrammarCompiler
from .messages import EngineStats, ErrorKind, FinishReason, RequestOutput, Submit
from .policy import FcfsQueue, age
from .request import Phase, Request, State
from .speculative import Speculation, new_speculation
from .stats import Counters


class Scheduler:
    """Requests from `add` to their one final output, and the pages they hold meanwhile."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KvCache,
        max_model_len: int,
        vocab_size: int,
        speculation: Speculation | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`config.max_num_batched_tokens` must be resolved and cover every running request."""
        budget = config.max_num_batched_tokens
        if budget is None or budget < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least "
                f"max_num_seqs ({config.max_num_seqs})"
            )
        self.cache = cache
        self.limits = Limits(min(max_model_len, cache.num_tokens), vocab_size)
        self.counters = Counters()
        self.running: list[Request] = []  # oldest first
        self.queue = FcfsQueue()
        self._grammars = grammars
        self._budget = budget
        self._config = config
        self._speculation = speculation or new_speculation("none")
        self._alive: dict[str, Request] = {}
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._alive)

    def add(self, submit: Submit) -> None:
        """Queue a request; raises DuplicateId, or Refused with the reason for its sender."""
        if submit.request_id in self._alive:
            raise DuplicateId(f"request id {submit.request_id!r} is in use")
        self.limits.verify(submit)
        if len(self._alive) >= self._config.max_num_seqs + self._config.max_queue:
            raise Overloaded(f"{len(self._alive)} requests are running or waiting already")
        self._arrivals += 1
        request = Request(
            submit.request_id,
            submit.prompt_ids,
            submit.params,
            self._arrivals,
            self.cache.page_size,
            matcher_of(submit, self._grammars),
        )
        self._alive[request.request_id] = request
        self.queue.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands; None for an id that is unknown or finished."""
        request = self._alive.get(request_id)
        return None if request is None else self._end(request, "abort")

    def schedule(self) -> Step:
        """Form the next step: every decode, then prompt chunks as far as the budget goes."""
        decodes = self._decodes()
        budget = self._budget - sum(work.num_tokens for work in decodes)
        extends: list[Work] = []
        for request in self.running:
            if request.phase is Phase.EXTEND and budget > 0:
                budget -= self._chunk(request, budget, extends)
        while budget > 0 and (request := self._admit()) is not None:
            budget -= self._chunk(request, budget, extends)
        width = max((work.num_tokens for work in decodes), default=0)
        extends += [work for work in decodes if work.num_tokens < width]
        decodes = [work for work in decodes if work.num_tokens == width]
        return Step(extends + decodes, len(extends))

    def commit(self, step: Step, results: Sequence[SequenceOutput]) -> list[RequestOutput]:
        """Book one result for each work of `step`; returns what there is to send."""
        self.counters.num_steps += 1
        outputs = []
        for work, result in zip(step.work, results, strict=True):
            request = work.request
            if result.error is not None:
                outputs.append(self._end(request, "error", result.error))
                continue
            num_rejected = len(work.draft_ids) + 1 - len(result.token_ids) if work.samples else 0
            request.num_computed = work.start + work.num_tokens - num_rejected
            if request.wants_prompt_scores:
                request.prompt_scores.extend(result.prompt_logprobs)
            if work.samples:
                outputs.append(self._take_tokens(work, result))
            elif request.num_computed == request.num_tokens:
                # Nothing was to be generated: the prompt's scores are the whole answer.
                self.counters.num_prompt_tokens += request.num_tokens
                outputs.append(self._end(request, "length"))
        return outputs

    def observe(self, step: Step, seconds: float) -> None:
        """Learn how long a step took."""
        self._speculation.observe(step, seconds)

    def preempt_youngest(self) -> Request:
        """Take seat and pages from the youngest running request; it is computed again later."""
        victim = self.running.pop()
        self.cache.release(victim.table)
        victim.preempt()
        self.queue.add(victim)
        self.counters.num_preemptions += 1
        return victim

    def check(self) -> None:
        """Raise RuntimeError unless pages, requests and limits agree (invariants of the tests)."""
        self.cache.check(request.table for request in self._alive.values())
        running = [r for r in self._alive.values() if r.state is State.RUNNING]
        if len(running) != len(self.running) or len(running) + len(self.queue) != len(self._alive):
            raise RuntimeError("a request is lost or stands in two places")
        others = [r for r in self._alive.values() if r.state is not State.RUNNING]
        if self.running != sorted(running, key=age) or (
            others and self.queue.head() is not min(others, key=age)
        ):
            raise RuntimeError("a request overtook an older one")
        for request in self._alive.values():
            known = request.num_computed if request.phase is Phase.DECODE else request.num_tokens
            tokens = known if request.state is State.RUNNING else 0
            reach = self._speculation.reach
            most = self.cache.pages_for(tokens + reach + (reach > 0)) if tokens else 0
            if not self.cache.pages_for(tokens) <= len(request.table.pages) <= most:
                raise RuntimeError(f"request {request.request_id} holds pages it does not need")

    def check_idle(self) -> None:
        """Raise RuntimeError if pages are missing although no request is alive."""
        pool = self.cache.pool
        if not self._alive and pool.num_free != pool.num_pages:
            raise RuntimeError(f"idle, yet {pool.num_pages - pool.num_free} pages are not free")

    def stats(self) -> EngineStats:
        pool, counters = self.cache.pool, self.counters
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.queue),
            num_pages=pool.num_pages,
            num_free_pages=pool.num_free,
            num_steps=counters.num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_preemptions=counters.num_preemptions,
            drafts=self._speculation.stats(),
        )

    def _decodes(self) -> list[Work]:
        """The newest token of every decoding request, and its drafts, oldest first.

        Short pages cost the youngest its run; drafts are only taken where there is room for them.

        Victims are taken from the end of the list that is walked from the front, so none of them
        has work in this step yet.
        """
        decoding = [request for request in self.running if request.phase is Phase.DECODE]
        drafts = self._speculation.propose(decoding, self._budget)
        works = []
        for request, guess in zip(decoding, drafts, strict=True):
            start = request.num_computed
            if start >= request.table.capacity and request.state is State.RUNNING:
                self._make_room(request)
            if request.state is not State.RUNNING:
                break
            draft_ids = guess[: self._room(request, start + 1, self._speculation.reach)]
            stop = start + 1 + len(draft_ids)
            ahead = self._num_to_draft(request, stop)
            works.append(Work(request, start, stop - start, True, draft_ids, ahead))
        return works

    def _room(self, request: Request, stop: int, num_rows: int) -> int:
        """Rows behind the first `stop` that guesses may be written to, at most `num_rows`.

        Pages are taken for them while each running request could still take one.
        """
        wanted = min(stop + num_rows, self.limits.max_tokens)
        if wanted > request.table.capacity:
            self.cache.grow(request.table, wanted, spare=len(self.running))
        return max(0, min(wanted, request.table.capacity) - stop)

    def _num_to_draft(self, request: Request, stop: int) -> int:
        """Guesses that the model shall make for the next step; all but the first need a row."""
        ahead = self._speculation.num_ahead
        return ahead and 1 + self._room(request, stop, ahead - 1)

    def _make_room(self, request: Request) -> None:
        """Find a page for the next token, unless `request` itself has to give way."""
        while not self.cache.grow(request.table, request.num_tokens):
            if self.preempt_youngest() is request:
                return

    def _admit(self) -> Request | None:
        """Start the request at the head of the queue if a seat and its pages are free."""
        request = self.queue.head()
        if request is None or len(self.running) >= self._config.max_num_seqs:
            return None
        if not self.cache.grow(request.table, request.num_tokens, spare=len(self.running)):
            return None
        self.queue.pop()
        request.admit()
        # All that run are older than all that wait, so the list stays ordered by age.
        self.running.append(request)
        return request

    def _chunk(self, request: Request, budget: int, extends: list[Work]) -> int:
        """Add the next chunk of an extending request; returns how many tokens it has."""
        start = request.num_computed
        size = min(request.num_tokens - start, budget)
        samples = start + size == request.num_tokens and request.params.max_tokens > 0
        ahead = self._num_to_draft(request, start + size) if samples else 0
        extends.append(Work(request, start, size, samples, (), ahead))
        return size

    def _take_tokens(self, work: Work, result: SequenceOutput) -> RequestOutput:
        """Append what was sampled up to the first token that ends the request."""
        request = work.request
        if not result.token_ids:
            raise RuntimeError(f"no token was sampled for request {request.request_id}")
        first = not request.output_ids
        before, reason = len(request.output_ids), None
        for token in result.token_ids:
            request.append(token)
            if (reason := request.end_behind(token, self.limits.max_tokens)) is not None:
                break
        if request.matcher is not None and (error := request.matcher.error) is not None:
            return self._end(request, "error", error, "invalid")
        token_ids = request.output_ids[before:]
        self.counters.num_generation_tokens += len(token_ids)
        self.counters.num_prompt_tokens += len(request.prompt_ids) if first else 0
        num_drafted = len(work.draft_ids)
        num_accepted = min(len(result.token_ids) - 1, len(token_ids))
        if num_drafted:
            self._speculation.count(num_drafted, num_accepted)
        request.draft_ids = result.draft_ids
        if reason is not None:
            self._retire(request, reason)
        wants_prompt = first and request.params.prompt_logprobs is not None
        return RequestOutput(
            request.request_id,
            token_ids,
            reason,
            result.logprobs[: len(token_ids)] or None,
            request.prompt_scores if wants_prompt else None,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
        )

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        kind: ErrorKind = "internal",
    ) -> RequestOutput:
        """Finish a request without a further token."""
        if request.state is not State.RUNNING:
            self.queue.remove(request)
        wants_prompt = reason == "length" and request.params.prompt_logprobs is not None
        scores = request.prompt_scores if wants_prompt else None
        self._retire(request, reason)
        return RequestOutput(
            request.request_id, [], reason, None, scores, error, None if error is None else kind
        )

    def _retire(self, request: Request, reason: FinishReason) -> None:
        if request.state is State.RUNNING:
            self.running.remove(request)
        self.cache.release(request.table)
        request.finish(reason)
        del self._alive[request.request_id]
