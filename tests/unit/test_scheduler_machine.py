"""Random histories of the scheduler: whatever happens in which order, the books and the ids hold.

Checked after every operation: pages are free or held by exactly one table and never both (I1 to
I4), tables are as long as their tokens need (I5), a request is in one place and ends once (I7),
steps keep to their limits (I8). At the end everything admitted has finished within a number of
steps that its tokens bound (I11), all pages are free (I12), and the ids are those of each request
alone.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minidsa.model.sequence import SequenceOutput
from minidsa.scheduler.admission import DuplicateId, Overloaded, Refused
from minidsa.scheduler.launch import launch
from scheduler_fakes import Driver, expected, submit


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that come, run, are thrown out, are given up, or lose a step to a failure."""

    @initialize(
        pages=st.integers(2, 24),
        page_size=st.sampled_from([1, 2, 4, 7]),
        seats=st.integers(1, 5),
        extra=st.integers(0, 12),
        queue=st.integers(1, 6),
    )
    def build(self, pages, page_size, seats, extra, queue):
        self.driver = Driver(
            pages=pages, page_size=page_size, seats=seats, budget=seats + extra, queue=queue
        )
        self.sent = {}
        self.aborted = set()
        self.failed = set()

    @rule(length=st.integers(1, 30), max_tokens=st.integers(0, 12), start=st.integers(0, 500))
    def add(self, length, max_tokens, start):
        name = f"r{len(self.sent)}"
        command = submit(name, [(start + 7 * i) % 512 for i in range(length)], max_tokens)
        longest = self.driver.scheduler.limits.max_tokens
        alive = len(self.sent) - len(self.driver.ends)
        full = alive == self.driver.seats + self.driver.queue
        try:
            self.driver.add(command)
        except Overloaded:
            assert full
        except Refused:
            assert length + min(max_tokens, 1) > longest
        else:
            assert not full and length + min(max_tokens, 1) <= longest
            self.sent[name] = command

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.scheduler.running)
    @rule()
    def preempt(self):
        self.driver.scheduler.preempt_last()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.sent)))
        if name not in self.driver.ends:
            self.aborted.add(name)
        self.driver.abort(name)

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule()
    def fail_a_step(self):
        step = self.driver.scheduler.schedule()
        assert step, "work is left, yet nothing is scheduled"
        launch(self.driver.runner, step)  # the failure comes after rows were written
        self.failed |= {work.request.request_id for work in step.work}
        lost = [SequenceOutput(error="planned") for _ in step.work]
        self.driver.take(self.driver.scheduler.commit(step, lost))

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(data=st.data())
    def use_an_id_twice(self, data):
        alive = sorted(set(self.sent) - set(self.driver.ends))
        command = submit(data.draw(st.sampled_from(alive)), [1, 2], 1)
        try:
            self.driver.scheduler.add(command)
        except DuplicateId:
            return
        raise AssertionError("a second request took over an id in use")

    @invariant()
    def books_agree(self):
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        scheduler.check()
        scheduler.check_idle()
        stats = scheduler.stats()
        alive = set(self.sent) - set(self.driver.ends)
        assert stats.num_running + stats.num_waiting == len(alive)
        held = len({page for r in scheduler.running for page in r.table.pages})
        assert stats.num_free_pages + held == stats.num_pages
        for name in alive:
            command, ids = self.sent[name], self.driver.ids[name]
            assert ids == expected(command.prompt_ids, len(ids))

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        alive = set(self.sent) - set(self.driver.ends)
        tokens = sum(
            len(self.sent[name].prompt_ids) + self.sent[name].params.max_tokens for name in alive
        )
        # The oldest request advances by at least a token in every step.
        self.driver.run(at_most=tokens + 1)
        assert set(self.driver.ends) == set(self.sent)
        assert (
            self.driver.scheduler.stats().num_free_pages == self.driver.scheduler.stats().num_pages
        )
        for name, command in self.sent.items():
            self.check_end(name, command)

    def check_end(self, name, command):
        reason, ids = self.driver.ends[name].finish_reason, self.driver.ids[name]
        assert ids == expected(command.prompt_ids, len(ids))
        if name in self.failed:
            assert reason == "error"
        elif name in self.aborted:
            assert reason == "abort"
        else:
            longest = self.driver.scheduler.limits.max_tokens - len(command.prompt_ids)
            assert reason == "length"
            assert len(ids) == min(command.params.max_tokens, longest)


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True
)
TestScheduler = SchedulerMachine.TestCase
