"""Takes requests in, hands out steps, books their results: the life of every request.

Pure bookkeeping on lists and integers, without tensors. `planner.py` forms the steps; here requests
come in, their results are booked, and they leave with one final output. A request that was meant to
be longer than all pages together finishes with "length" there.
"""

import time
from collections.abc import Callable, Sequence

from ..configs.engine import SchedulerConfig
from ..kv_cache.cache import KvCache
from ..model.sequence import SequenceOutput
from .admission import DuplicateId, Limits, Overloaded, matcher_of
from .batch import Step, Work
from .deadlines import WAITED_TOO_LONG, Deadlines
from .grammar import GrammarCompiler
from .messages import EngineStats, ErrorKind, FinishReason, RequestOutput, Submit
from .planner import StepPlanner
from .request import Phase, Request, State
from .roster import Roster
from .speculative import Speculation, new_speculation
from .stats import Counters, engine_stats


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for a token budget that is open or does not cover every seat."""
        self.cache = cache
        self.limits = Limits(min(max_model_len, cache.num_tokens), vocab_size)
        self.counters = Counters()
        self._roster = Roster()
        self.running, self.queue = self._roster.running, self._roster.queue
        self._grammars = grammars
        self._config = config
        self._clock = clock
        self._deadlines = Deadlines(config.queue_timeout, clock)
        self._speculation = speculation or new_speculation("none")
        self._planner = StepPlanner(
            config, self._roster, cache, self.counters, self.limits.max_tokens, self._speculation
        )
        self._alive = self._roster.alive

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
        matcher = matcher_of(submit, self._grammars)
        handling = submit.handling
        rule = submit.params.attention
        salts = (handling.tenant, handling.cache_salt, *(() if rule is None else (rule.salt,)))
        table = self.cache.new_table(salts, reuse=handling.uses_cache)
        rank = self._roster.next_rank(handling)
        request = Request(submit, rank, table, self.counters.num_steps, matcher)
        request.arrived = self._clock()
        self._roster.add(request)
        self._deadlines.watch(request, handling.deadline_seconds)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands; None for an id that is unknown or finished."""
        request = self._alive.get(request_id)
        return None if request is None else self._end(request, "abort")

    def expire(self) -> list[RequestOutput]:
        """End what took too long: with an error if it never ran, else where it is."""
        return [
            self._end(request, "abort")
            if request.has_run
            else self._end(request, "error", WAITED_TOO_LONG, "timeout")
            for request in self._deadlines.due()
        ]

    def schedule(self) -> Step:
        """Form the next step; false when there is nothing to compute."""
        step = self._planner.plan()
        self.cache.settle()
        for work in step.work[: step.num_extends]:
            if (request := work.request).queue_seconds is None:
                request.queue_seconds = self._clock() - request.arrived
        return step

    def schedule_behind(self, step: Step) -> Step:
        """Form the step after `step` before its tokens are known; false where that cannot be.

        Nothing else is scheduled until `step` was committed. The new step may be dropped.
        """
        following = self._planner.plan_behind(step)
        self.cache.settle()
        return following

    def preempt_last(self) -> Request:
        """Put the running request of the last rank back into the queue, as short pages do."""
        return self._planner.preempt_last()

    def commit(self, step: Step, results: Sequence[SequenceOutput]) -> list[RequestOutput]:
        """Book one result for each work of `step`; returns what there is to send.

        Results of requests that have ended since the step was formed are dropped.
        """
        self.counters.count_step(step.num_tokens)
        outputs, page_size = [], self.cache.page_size
        for work, result in zip(step.work, results, strict=True):
            request, num_drafts = work.request, len(work.draft_ids)
            if request.state is not State.RUNNING:
                continue
            if result.error is not None:
                outputs.append(self._end(request, "error", result.error))
                continue
            num_rejected = num_drafts + 1 - len(result.token_ids) if num_drafts else 0
            request.num_computed = work.start + work.num_tokens - num_rejected
            if result.prompt_logprobs:
                request.prompt_scores.extend(result.prompt_logprobs)
            if work.samples:
                outputs.append(self._take_tokens(work, result))
            elif request.num_computed == request.num_tokens:
                # Nothing was to be generated: the prompt's scores are the whole answer.
                self.counters.num_prompt_tokens += request.num_tokens
                outputs.append(self._end(request, "length"))
            has_full_page = request.num_computed // page_size > request.table.num_shared
            if has_full_page and request.state is State.RUNNING:
                self._publish(request)
        self.counters.num_generation_tokens += sum([len(output.token_ids) for output in outputs])
        return outputs

    def observe(self, step: Step, seconds: float) -> None:
        """Learn how long a step took."""
        self.counters.step_seconds += seconds
        self._speculation.observe(step, seconds)

    def flush_cache(self) -> bool:
        """Forget every cached prefix; False, with nothing done, while requests are alive."""
        if not self._alive:
            self.cache.flush()
        return not self._alive

    def check(self) -> None:
        """Raise RuntimeError unless pages, requests and limits agree (invariants of the tests)."""
        self.cache.check(request.table for request in self._alive.values())
        self._roster.check()
        for request in self._alive.values():
            known = request.num_computed if request.phase is Phase.DECODE else request.num_tokens
            tokens = known if request.state is State.RUNNING else 0
            reach = self._speculation.reach
            reach = max(reach + (reach > 0), self._planner.num_ahead)
            most = self.cache.pages_for(tokens + reach) if tokens else 0
            if not self.cache.pages_for(tokens) <= len(request.table.pages) <= most:
                raise RuntimeError(f"request {request.request_id} holds pages it does not need")

    def check_idle(self) -> None:
        """Raise RuntimeError if pages are missing although no request is alive."""
        held = self.cache.pool.num_pages - self.cache.num_available
        if held and not self._alive:
            raise RuntimeError(f"idle, yet {held} pages are held")

    def stats(self) -> EngineStats:
        return engine_stats(self._roster, self.cache, self.counters, self._speculation.stats())

    def _take_tokens(self, work: Work, result: SequenceOutput) -> RequestOutput:
        """Append what was sampled up to the first token that ends the request."""
        request = work.request
        if not result.token_ids:
            raise RuntimeError(f"no token was sampled for request {request.request_id}")
        before, reason = len(request.output_ids), None
        for token in result.token_ids:
            if (reason := request.take(token, self.limits.max_tokens)) is not None:
                break
        if request.matcher is not None and (error := request.matcher.error) is not None:
            return self._end(request, "error", error, "invalid")
        token_ids = result.token_ids if reason is None else request.output_ids[before:]
        prompt_scores = None
        if not before:
            self.counters.num_prompt_tokens += len(request.prompt_ids)
            prompt_scores = (
                request.prompt_scores if request.params.prompt_logprobs is not None else None
            )
        num_drafted, num_accepted = len(work.draft_ids), 0
        if num_drafted:
            num_accepted = min(len(result.token_ids) - 1, len(token_ids))
            self._speculation.count(num_drafted, num_accepted)
        request.draft_ids = result.draft_ids
        if reason is not None:
            self._retire(request, reason)
        # By position: this is built for every token, and keywords take as long as the rest of it.
        return RequestOutput(
            request.request_id,
            token_ids,
            reason,
            result.logprobs[: len(token_ids)] if result.logprobs else None,
            prompt_scores,
            None,
            None,
            num_drafted,
            num_accepted,
            request.num_cached or 0,
            None if before else request.queue_seconds,
        )

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        kind: ErrorKind = "internal",
    ) -> RequestOutput:
        """Finish a request without a further token."""
        wants_prompt = reason == "length" and request.params.prompt_logprobs is not None
        self._retire(request, reason)
        return RequestOutput(
            request.request_id,
            [],
            reason,
            prompt_logprobs=request.prompt_scores if wants_prompt else None,
            error=error,
            error_kind=None if error is None else kind,
            cached_tokens=request.num_cached or 0,
            queue_seconds=None if request.output_ids else request.queue_seconds,
        )

    def _publish(self, request: Request) -> None:
        """Let other requests find what was computed; rows behind the end of a request are void."""
        num_valid = min(request.num_computed, request.num_tokens)
        self.cache.publish(request.table, request.tokens, num_valid)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        if reason == "error":
            # What it computed may be what it failed on.
            self.cache.discard(request.table)
        else:
            self._publish(request)
            self.cache.release(request.table)
        self._roster.finish(request, reason)
