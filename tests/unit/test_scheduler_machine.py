"""Random histories of the scheduler: whatever happens in which order, books, rows and ids hold.

Checked after every operation: pages are free, idle or held, and counted as often as they are held
(I1 to I4), tables are as long as their tokens need (I5), latent and index rows behind a table are
those of its own tokens and its own tenant (I6, I9), a request is in one place and ends once (I7),
steps keep to their limits (I8), rejected drafts are never kept (I10), the tokens sent are those of
the request alone (I14). At the end everything admitted has finished within a number of steps that
its tokens bound (I11), and all pages are free again (I12).
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_model import stem
from canary_runner import CanaryDriver, continuation
from minidsa.model.sequence import SequenceOutput
from minidsa.scheduler.admission import DuplicateId, Overloaded, Refused
from minidsa.scheduler.launch import launch
from minidsa.scheduler.messages import Handling
from minidsa.scheduler.request import State
from minidsa.scheduler.speculative import new_speculation
from scheduler_fakes import submit

QUEUE_TIMEOUT = 50.0


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that come, run, are thrown out, given up, too late, or lost to a failure."""

    @initialize(
        pages=st.integers(2, 24),
        page_size=st.sampled_from([1, 2, 4, 7]),
        host_pages=st.sampled_from([None, None, 2, 30]),
        seats=st.integers(1, 5),
        extra=st.integers(0, 12),
        queue=st.integers(1, 6),
        drafter=st.sampled_from(["none", "none", "ngram", "mtp"]),
        num_drafts=st.integers(1, 3),
        order=st.sampled_from(["shortest", "oldest"]),
        chunk=st.sampled_from([None, 1, 5]),
        poisons=st.booleans(),
        leads=st.booleans(),
    )
    def build(self, drafter, num_drafts, order, chunk, seats, extra, **sizes):
        self.clock = Clock()
        self.driver = CanaryDriver(
            seats=seats,
            budget=seats + extra,
            speculation=new_speculation(drafter, num_drafts, adaptive=False),
            prefill_order=order,
            max_prefill_tokens=chunk,
            queue_timeout=QUEUE_TIMEOUT,
            clock=self.clock,
            **sizes,
        )
        self.scheduler = self.driver.scheduler
        self.aborted, self.failed, self.late = set(), set(), set()
        self.ends_at, self.starts_by = {}, {}

    @property
    def sent(self):
        return self.driver.commands

    @property
    def alive(self):
        return sorted(set(self.sent) - set(self.driver.ends))

    @property
    def is_ahead(self):
        """Whether a step is under way: until it is booked, nothing else is scheduled."""
        return self.driver.pipeline.is_ahead

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, 30),
        max_tokens=st.integers(0, 12),
        tenant=st.sampled_from(["", "", "a"]),
        cache_salt=st.sampled_from(["", "", "a"]),
        uses_cache=st.sampled_from([True, True, True, False]),
        priority=st.integers(-2, 2),
        deadline=st.sampled_from([None, None, 5.0]),
        scores=st.sampled_from([None, None, 1]),
    )
    def add(self, kind, length, max_tokens, deadline, scores, **handling):
        name = f"r{len(self.sent)}"
        handling = Handling(deadline_seconds=deadline, **handling)
        command = submit(name, stem(kind, length), max_tokens, handling, prompt_logprobs=scores)
        longest = self.scheduler.limits.max_tokens
        full = len(self.alive) == self.driver.seats + self.driver.queue
        try:
            self.driver.add(command)
        except Overloaded:
            assert full
        except Refused:
            assert length + min(max_tokens, 1) > longest
        else:
            assert not full and length + min(max_tokens, 1) <= longest
            self.ends_at[name] = self.clock.now + (deadline or float("inf"))
            self.starts_by[name] = self.clock.now + QUEUE_TIMEOUT

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.scheduler.running and not self.is_ahead)
    @rule()
    def preempt(self):
        self.scheduler.preempt_last()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.sent)))
        if name not in self.driver.ends:
            self.aborted.add(name)
        self.driver.abort(name)

    @rule(seconds=st.sampled_from([1.0, 4.0, 60.0]))
    def let_time_pass(self, seconds):
        """Deadlines and the bound of the queue end exactly those whose time is over."""
        self.clock.now += seconds
        now, has_run = self.clock.now, {name for name in self.alive if self.has_run(name)}
        over = {
            name
            for name in self.alive
            if now >= self.ends_at[name] or (now >= self.starts_by[name] and name not in has_run)
        }
        before = set(self.alive)
        self.driver.take(self.scheduler.expire())
        assert before - set(self.alive) == over
        self.late |= over
        for name in over:
            reason = self.driver.ends[name].finish_reason
            assert reason == ("abort" if name in has_run else "error")

    @precondition(lambda self: self.scheduler.has_work and not self.is_ahead)
    @rule(writes=st.booleans(), data=st.data())
    def fail_a_step(self, writes, data):
        """Some works of a step fail, before or after rows were written; those are spoilt."""
        step = self.scheduler.schedule()
        assert step, "work is left, yet nothing is scheduled"
        names = [work.request.request_id for work in step.work]
        lost = {name for name in names if data.draw(st.booleans())}
        results = launch(self.driver.runner, step)
        self.failed |= lost
        running = self.scheduler.running
        held = {p for r in running if r.request_id not in lost for p in r.table.pages}
        for work in step.work:
            if writes and work.request.request_id in lost:
                for page in set(work.request.table.pages) - held:
                    self.driver.canaries.poison(page)
        error = SequenceOutput(error="planned")
        made = [error if n in lost else r for n, r in zip(names, results, strict=True)]
        self.driver.take(self.scheduler.commit(step, made))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def use_an_id_twice(self, data):
        command = submit(data.draw(st.sampled_from(self.alive)), [1, 2], 1)
        try:
            self.scheduler.add(command)
        except DuplicateId:
            return
        raise AssertionError("a second request took over an id in use")

    @rule()
    def flush(self):
        is_idle = not self.scheduler.has_work
        assert self.scheduler.flush_cache() == is_idle
        if is_idle:
            stats = self.scheduler.stats()
            assert stats.num_cached_pages == stats.num_host_pages == 0
            assert self.scheduler.cache.pool.num_free == stats.num_pages

    @rule()
    def finish_all(self):
        """No more comes: the request of the first rank advances by a token in every step."""
        tokens = sum(
            len(self.sent[name].prompt_ids) + self.sent[name].params.max_tokens
            for name in self.alive
        )
        self.driver.run(at_most=tokens + 1)
        assert not self.alive
        stats = self.scheduler.stats()
        assert stats.num_free_pages == stats.num_pages

    def has_run(self, name):
        (request,) = [r for r in self.scheduler._alive.values() if r.request_id == name]
        return request.has_run

    @invariant()
    def books_agree(self):
        if not hasattr(self, "driver"):
            return
        self.scheduler.check()
        self.scheduler.check_idle()
        self.driver.check_rows()
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.alive)
        held = len({page for r in self.scheduler.running for page in r.table.pages})
        assert stats.num_free_pages + held == stats.num_pages
        for request in self.scheduler.running:
            assert request.state is State.RUNNING
        for name in self.alive:
            ids = self.driver.ids[name]
            assert ids == continuation(self.sent[name].prompt_ids, len(ids))

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.finish_all()
        self.flush()
        for name, command in self.sent.items():
            self.check_end(name, command)

    def check_end(self, name, command):
        end, ids = self.driver.ends[name], self.driver.ids[name]
        assert ids == continuation(command.prompt_ids, len(ids))
        assert end.cached_tokens < len(command.prompt_ids)
        if name in self.late:
            assert end.finish_reason in ("abort", "error")
        elif name in self.failed:
            assert end.finish_reason == "error"
        elif name in self.aborted:
            assert end.finish_reason == "abort"
        else:
            longest = self.scheduler.limits.max_tokens - len(command.prompt_ids)
            assert end.finish_reason == "length"
            assert len(ids) == min(command.params.max_tokens, longest)
            self.check_scores(name, command)

    def check_scores(self, name, command):
        """Prompt scores are sent once, and whole."""
        outputs = [o for o in self.driver.outputs if o.request_id == name]
        sent = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        if command.params.prompt_logprobs is None:
            assert not sent
        else:
            (scores,) = sent
            assert [entry.rank - 1 for entry in scores] == command.prompt_ids[1:]


SchedulerMachine.TestCase.settings = settings(
    max_examples=3 * settings().max_examples, stateful_step_count=40, derandomize=True
)
TestScheduler = SchedulerMachine.TestCase
