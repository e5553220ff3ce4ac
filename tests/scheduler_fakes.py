"""An engine without a model: its next token is a hash of the tokens it can see through the pages.

The fake runner keeps the token ids of every slot. What it generates depends on each token of the
request as read back through the block table, so a page that was lost, shared by mistake or not
recomputed shows up as a wrong token. `expected` computes the same without any cache.

Faults are one plan object that a test hands over when it builds an engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minidsa.attention.sparse.selection_counts import SelectionCounts
from minidsa.configs.engine import EngineConfig, SchedulerConfig
from minidsa.configs.engine_info import EngineInfo, StartPlan
from minidsa.configs.logprobs import TokenLogprobs
from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.cache import KvCache
from minidsa.kv_cache.pool import PagePool
from minidsa.model.sequence import NON_FINITE, SequenceInput, SequenceOutput, num_accepted
from minidsa.scheduler.batch import Step
from minidsa.scheduler.grammar import GrammarCompiler
from minidsa.scheduler.messages import Handling, RequestOutput, Submit
from minidsa.scheduler.pipeline import Pipeline
from minidsa.scheduler.scheduler import Scheduler
from minidsa.scheduler.speculative import Speculation
from minidsa.scheduler.worker import serve
from runners import AtOnce, Leading

VOCAB = 512
POISON = -1  # what a slot holds when nobody may read it


def next_token(tokens: Sequence[int]) -> int:
    """FNV-1a over the tokens: order matters, and so does each of them."""
    state = 0xCBF29CE484222325
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x100000001B3) & (1 << 64) - 1
    return (state >> 20) % VOCAB


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """`count` outputs of a request that runs alone, to its end, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def score(token: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token), token + 1, list(range(num_top)), [0.0] * num_top)


@dataclass(frozen=True)
class Plan:
    """Faults of a run; steps count from 1, the warm-up's included.

    hang_step never returns; poison_token makes every row that sees it non-finite; lose_step returns
    one output too few; a step with fatal_token among its tokens raises.
    """

    fail_steps: frozenset[int] = frozenset()
    fail_forever_from: int | None = None
    hang_step: int | None = None
    delay: float = 0.0
    poison_token: int | None = None
    lose_step: int | None = None
    fatal_token: int | None = None


class PoisoningPool(PagePool):
    """A pool that makes the rows of a page unreadable the moment the page is free."""

    def __init__(self, num_pages: int, page_size: int, slots: list[int]) -> None:
        super().__init__(num_pages)
        self._page_size = page_size
        self._slots = slots

    def reclaim(self, page: int) -> None:
        super().reclaim(page)
        start = page * self._page_size
        self._slots[start : start + self._page_size] = [POISON] * self._page_size


class FakeRunner(AtOnce):
    """Stores token ids where a model stores rows, and refuses to read what was never written."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        plan: Plan | None = None,
        reuses_prefixes: bool = True,
    ) -> None:
        self.reuses_prefixes = reuses_prefixes
        self.slots = [POISON] * ((num_pages + 1) * page_size)
        self.page_size = page_size
        self.plan = plan or Plan()
        self.num_steps = 0
        self.batches: list[list[int]] = []  # tokens of each work, step by step

    def cache(self) -> KvCache:
        """Bookkeeping for these slots, which poisons what it frees."""
        num_pages = len(self.slots) // self.page_size - 1
        cache = KvCache(num_pages, self.page_size, self.reuses_prefixes)
        cache.pool = PoisoningPool(num_pages, self.page_size, self.slots)
        return cache

    def run(self, sequences: Sequence[SequenceInput], num_extends: int) -> list[SequenceOutput]:
        self.num_steps += 1
        self._misbehave()
        lengths = [len(s.token_ids) for s in sequences]
        assert len(set(lengths[num_extends:])) < 2, "decodes bring equally many tokens"
        self.batches.append(lengths)
        for sequence in sequences:
            for i, token in enumerate(sequence.token_ids, sequence.context_len):
                self.slots[self._slot(sequence, i)] = token
        if any(self.plan.fatal_token in sequence.token_ids for sequence in sequences):
            raise RuntimeError("planned failure of a token")
        lost = self.num_steps == self.plan.lose_step
        return [self._output(sequence) for sequence in sequences[: len(sequences) - lost]]

    def _misbehave(self) -> None:
        plan = self.plan
        time.sleep(plan.delay)
        if self.num_steps == plan.hang_step:
            time.sleep(3600)
        forever = plan.fail_forever_from
        if self.num_steps in plan.fail_steps or (forever and self.num_steps >= forever):
            raise RuntimeError(f"planned failure of step {self.num_steps}")

    def _slot(self, sequence: SequenceInput, position: int) -> int:
        page = sequence.pages[position // self.page_size]
        assert page > 0 or sequence.pages == [0], "page 0 belongs to nobody but a probe"
        return page * self.page_size + position % self.page_size

    def _seen(self, sequence: SequenceInput) -> list[int]:
        """The tokens up to the end of this part, as its pages have them."""
        stop = sequence.context_len + len(sequence.token_ids)
        seen = [self.slots[self._slot(sequence, i)] for i in range(stop)]
        assert POISON not in seen, "a row was read that nobody wrote"
        return seen

    def _output(self, sequence: SequenceInput) -> SequenceOutput:
        seen = self._seen(sequence)
        output = SequenceOutput()
        if (tops := sequence.num_prompt_logprobs) is not None:
            output.prompt_logprobs = [score(token, tops) for token in sequence.following_ids]
        if sequence.sample is None:
            return output
        known = len(seen) - sequence.num_drafts
        rows = [seen[:length] for length in range(known, len(seen) + 1)]
        sampled = [next_token(row) for row in rows if self.plan.poison_token not in row]
        if not sampled:
            return SequenceOutput(error=NON_FINITE)
        output.token_ids = sampled[: num_accepted(sequence.draft_ids, sampled) + 1]
        if (top := sequence.sample.params.logprobs) is not None:
            output.logprobs = [score(token, top) for token in output.token_ids]
        output.draft_ids = self._guess(sequence, seen[:known] + output.token_ids)
        return output

    def _guess(self, sequence: SequenceInput, tokens: list[int]) -> list[int]:
        """The next tokens, every third of them wrong; all but the first need a row to feed on."""
        guesses: list[int] = []
        for i in range(sequence.num_to_draft):
            if i:
                self._slot(sequence, len(tokens) + i - 2)
            token = next_token(tokens + guesses)
            guesses.append(token if token % 3 else (token + 1) % VOCAB)
        return guesses


class PreemptingScheduler(Scheduler):
    """Throws the youngest request out every `every` steps, whether pages are short or not.

    watch: shown every step before it is started.
    """

    every = 0
    _turns = 0
    watch: Callable[[Step], None] | None = None

    def schedule(self) -> Step:
        self._turns += 1
        if self.every and self._turns % self.every == 0 and self.running:
            self.preempt_last()
        return self._show(super().schedule())

    def schedule_behind(self, step: Step) -> Step:
        if self.every and (self._turns + 1) % self.every == 0:
            return Step([], 0)
        following = super().schedule_behind(step)
        self._turns += bool(following)
        return self._show(following)

    def _show(self, step: Step) -> Step:
        if self.watch is not None:
            self.watch(step)
        return step


def submit(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    handling: Handling | None = None,
    **settings: object,
) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **settings)  # type: ignore[arg-type]
    return Submit(request_id, list(prompt), params, handling=handling or Handling())


@dataclass(frozen=True)
class FakeLoaded:
    runner: FakeRunner
    kv_cache: KvCache
    info: EngineInfo
    selection: SelectionCounts | None = None

    def prepare(self, alive: Callable[[], None]) -> None:
        """Steps need nothing but the runner."""
        alive()


@dataclass(frozen=True)
class FakeTarget:
    """What a spawned engine process runs instead of a model: EngineProcess.start(config, target)"""

    plan: Plan = Plan()
    refuse: ValueError | None = None
    tensors: int = 0
    tensor_seconds: float = 0.0
    vocab_size: int = VOCAB

    def __call__(self, directory: str, config: EngineConfig) -> None:
        serve(directory, config, self.check)

    def check(self, config: EngineConfig) -> "FakeStart":
        if self.refuse:
            raise self.refuse
        return FakeStart(self, config)

    def load(self, config: EngineConfig) -> FakeLoaded:
        page_size, num_pages = config.cache.page_size or 4, config.cache.num_pages or 64
        runner = FakeRunner(num_pages, page_size, self.plan)
        info = EngineInfo(
            model_type="fake",
            vocab_size=self.vocab_size,
            eos_token_ids=[0],
            num_parameters=0,
            weight_bytes=0,
            dtype="float32",
            device="cpu",
            attention_backend="none",
            cache_bytes_per_token=4,
            cache_dtype="float32",
            notes=[],
            max_model_len=config.max_model_len or 128,
            page_size=page_size,
            num_cache_tokens=num_pages * page_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 64,
            max_prefill_tokens=config.scheduler.max_prefill_tokens or 64,
            speculative="none",
            num_speculative_tokens=0,
        )
        return FakeLoaded(runner, runner.cache(), info)


@dataclass(frozen=True)
class FakeStart:
    target: FakeTarget
    config: EngineConfig

    @property
    def plan(self) -> StartPlan:
        return StartPlan("fake", self.target.vocab_size, [])

    def load(self, alive: Callable[[], None]) -> FakeLoaded:
        for _ in range(self.target.tensors):
            time.sleep(self.target.tensor_seconds)
            alive()
        return self.target.load(self.config)


class Driver:
    """Runs a scheduler on a fake runner step by step, checks the books after each, keeps the ids

    leads: decodes are started before the tokens in front of them are booked.
    """

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        budget: int = 64,
        seats: int = 8,
        queue: int = 64,
        max_model_len: int = 512,
        preempt_every: int = 0,
        plan: Plan | None = None,
        runner: Any = None,
        cache: KvCache | None = None,
        speculation: Speculation | None = None,
        reuse: bool = True,
        leads: bool = False,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
        **scheduling: Any,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=seats, max_num_batched_tokens=budget, max_queue=queue, **scheduling
        )
        self.runner: Any = runner or FakeRunner(pages, page_size, plan, reuse)
        self.scheduler = PreemptingScheduler(
            config, cache or self.runner.cache(), max_model_len, VOCAB, speculation, grammars, clock
        )
        self.scheduler.every = preempt_every
        self.scheduler.watch = self._check_step
        self.leading = Leading(self.runner, leads)
        self.pipeline = Pipeline(self.leading, self.scheduler)
        self.budget, self.seats, self.queue = budget, seats, queue
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}
        self.outputs: list[RequestOutput] = []

    def add(self, *submits: Submit) -> None:
        for command in submits:
            self.scheduler.add(command)
            self.ids[command.request_id] = []

    def step(self) -> Step:
        step, outputs = self.pipeline.advance()
        self.take(outputs)
        self.scheduler.check()
        return step

    def run(self, at_most: int = 10_000) -> int:
        """Steps until nothing is left to do."""
        for count in range(at_most):
            if not self.step():
                assert not self.scheduler.has_work, "work is left, yet nothing is scheduled"
                self.scheduler.check_idle()
                return count
        raise AssertionError(f"not done after {at_most} steps")

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        self.take([] if output is None else [output])
        self.scheduler.check()

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        self.outputs += outputs
        for output in outputs:
            request_id = output.request_id
            assert request_id not in self.ends, "an output after the last one"
            self.ids[request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[request_id] = output

    def _check_step(self, step: Step) -> None:
        scheduler = self.scheduler
        assert step.num_tokens <= self.budget
        assert len(scheduler.running) <= self.seats
        assert len(scheduler.running) + len(scheduler.queue) <= self.seats + self.queue
        requests = [work.request for work in step.work]
        assert len({id(request) for request in requests}) == len(requests)
        for work in step.work:
            assert work.num_tokens >= 1
            assert work.request.table.capacity >= work.start + work.num_tokens
