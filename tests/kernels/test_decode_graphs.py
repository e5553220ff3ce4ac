"""Replayed decode steps against eager ones: padding, lengths that grow, dense and selecting.

With a GPU the graphs are captured; without one a replay runs the same work again over the same
tensors, which shows whether everything that changes between steps is written into them.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import T_CPU, new_folder, tensors_of
from grammar_bed import params, small_compiler
from kernel_bed import DEVICE, HAS_GPU, run_again
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.dense.triton import TritonDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model import decode_graphs
from minidsa.model import runner as runner_module
from minidsa.model.checkpoint import read_config
from minidsa.model.decode_graphs import SIZES, USUAL_LENGTH, DecodeGraphs
from minidsa.model.inputs import Span, attention_batch, to_tensor
from minidsa.model.loader import load_model
from minidsa.model.make_checkpoint import write_checkpoint
from minidsa.model.runner import ModelRunner
from minidsa.model.sequence import (
    NON_FINITE,
    Computed,
    Constraint,
    SampleInput,
    SequenceInput,
    SequenceOutput,
)
from minidsa.model.step_memory import LARGEST_REPLAYED
from minidsa.scheduler.grammar import Matcher
from stepper import new_storage

# What is served over kernels; torch's grouped products of fp32 wait for the host.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
RTOL, ATOL = (3e-2, 6e-2) if HAS_GPU else (2e-4, 2e-4)
PAGE = 16
PAGES = 40


@functools.cache
def two_layers(mtp_layers: int = 0) -> Path:
    folder = new_folder()
    config = dict(T_CPU) | {"num_hidden_layers": 2, "num_nextn_predict_layers": mtp_layers}
    write_checkpoint(folder, config, tensors_of(config))
    return folder


class Bed:
    """One model over two caches with the same rows: one is stepped eagerly, the other replayed."""

    def __init__(self, lengths: Sequence[int], *, guesses: bool = False) -> None:
        folder = two_layers(int(guesses))
        config = read_config(folder)
        self.model = load_model(folder, config, DTYPE, DEVICE, with_mtp=guesses)
        assert config.indexer is not None
        topk = config.indexer.topk
        self.storages = [new_storage(self.model, PAGES, PAGE) for _ in range(2)]
        self.backends = [DsaBackend(TritonDenseBackend(s), s, topk) for s in self.storages]
        capture = None if HAS_GPU else run_again
        self.graphs = DecodeGraphs(self.model, self.backends[1], self.storages[1], capture)
        order = (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
        each = (PAGES - 1) // len(lengths)
        self.pages = [order[i * each : (i + 1) * each] for i in range(len(lengths))]
        self.lengths = list(lengths)
        # Prompts are no steps that are replayed: both caches begin with the same rows, and where
        # kernels are interpreted, slowly, these come from torch.
        first, second = self.storages
        prompts = self.backends[0]
        if not HAS_GPU:
            prompts = DsaBackend(TorchDenseBackend(first), first, topk)
        for length, pages in zip(lengths, self.pages, strict=True):
            ids = [(7 * i + length) % 500 for i in range(length)]
            self._eager(prompts, first, ids, [Span(0, length, pages)], 1)
        for written, plane in zip(first.planes(), second.planes(), strict=True):
            plane.copy_(written)

    @torch.inference_mode()
    def _eager(
        self,
        backend: DsaBackend,
        storage: CacheStorage,
        ids: Sequence[int],
        spans: Sequence[Span],
        num_extends: int,
    ) -> torch.Tensor:
        plan = backend.plan(attention_batch(spans, num_extends, PAGE, DEVICE))
        return self.model.forward(to_tensor(ids, DEVICE), plan, backend, storage)

    @torch.inference_mode()
    def step(self, requests: Sequence[int], width: int = 1) -> None:
        """Both ways; the results must agree, and so must everything that was written."""
        spans = [Span(self.lengths[r], width, self.pages[r]) for r in requests]
        ids = [(11 * s.context_len + j) % 500 for s in spans for j in range(width)]
        expected = self._eager(self.backends[0], self.storages[0], ids, spans, 0)
        replayed = self.graphs.forward(ids, spans)
        assert replayed is not None
        torch.testing.assert_close(replayed.hidden_TD, expected, rtol=RTOL, atol=ATOL)
        for request in requests:
            self.lengths[request] += width

    def check_rows(self) -> None:
        eager, replayed = (s.latent_LSC[:, PAGE:] for s in self.storages)
        torch.testing.assert_close(replayed, eager, rtol=RTOL, atol=ATOL, equal_nan=True)


def test_steps_of_changing_batches():
    bed = Bed([13, 30, 5])
    for requests in ([0, 1, 2], [2, 0], [1], [0, 1, 2]):
        bed.step(requests)
    bed.check_rows()
    # Three requests share the graph of four; their tables hold two pages, or four.
    assert {shape.requests for shape in bed.graphs.shapes} == {1, 2, 4}
    assert all(shape.pages in (1, 2, 4) for shape in bed.graphs.shapes)


def test_from_dense_to_selecting():
    bed = Bed([14, 9])
    for _ in range(4):
        bed.step([0, 1])
    bed.check_rows()
    assert [shape.selects for shape in bed.graphs.shapes] == [False, True]


def test_verify_of_three_tokens():
    bed = Bed([12, 20])
    for _ in range(2):
        bed.step([0, 1], width=3)
    bed.check_rows()
    assert {shape.width for shape in bed.graphs.shapes} == {3}


GREEDY = SamplingParams(max_tokens=9, seed=0, temperature=0.0)


def runners_of(bed: Bed) -> list[ModelRunner]:
    """One that runs eagerly, one that replays."""
    return [
        ModelRunner(bed.model, bed.backends[0], bed.storages[0]),
        ModelRunner(bed.model, bed.backends[1], bed.storages[1], bed.graphs),
    ]


def speak(
    bed: Bed, runner: ModelRunner, params: SamplingParams, steps: int, num_to_draft: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Tokens of every request over some steps, and the drafts they were verified by."""
    said: list[tuple[list[int], list[int]]] = [([5 + i], []) for i in range(len(bed.pages))]
    drafts: list[list[int]] = [[] for _ in said]
    for _ in range(steps):
        inputs = [
            SequenceInput(
                [tokens[-1], *drafts[i]],
                bed.lengths[i] + len(tokens) - 1,
                bed.pages[i],
                SampleInput(params, [1], tokens[1:]),
                num_drafts=len(drafts[i]),
                num_to_draft=num_to_draft,
            )
            for i, (tokens, _) in enumerate(said)
        ]
        outputs = runner.run(inputs, 0)
        drafts = [output.draft_ids for output in outputs]
        for (tokens, drafted), output in zip(said, outputs, strict=True):
            assert output.error is None
            tokens += output.token_ids
            drafted += output.draft_ids
    return said


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_runner_says_the_same_tokens_with_graphs(temperature):
    bed = Bed([4, 18])
    params = SamplingParams(max_tokens=9, seed=3, temperature=temperature)
    eager, replayed = (speak(bed, runner, params, steps=2) for runner in runners_of(bed))
    assert eager == replayed
    work = "layers" if temperature else "greedy"
    assert {shape.work for shape in bed.graphs.shapes} == {work}


def rows_of(asked: Sequence[dict[str, Any]], grammar: str | None = None) -> list[SampleInput]:
    """A request of each kind; the last of them under the grammar, if there is one."""
    rows = [SampleInput(params(max_tokens=9, seed=3, **fields), [1, 7, 1], []) for fields in asked]
    if grammar is not None:
        rows[-1].constraint = small_compiler().compile(grammar, rows[-1].params)
    return rows


def take(rows: Sequence[SampleInput], outputs: Sequence[SequenceOutput]) -> None:
    """Book what was chosen."""
    for row, output in zip(rows, outputs, strict=True):
        assert output.error is None and isinstance(row.output_ids, list)
        row.output_ids += output.token_ids
        if isinstance(row.constraint, Matcher):
            row.constraint.accept(output.token_ids)


def speak_ahead(
    bed: Bed, runner: ModelRunner, rows: Sequence[SampleInput]
) -> list[list[SequenceOutput]]:
    """Three steps of every request but the first, which leaves after two; the layers of each step
    are started before the tokens of the step in front of it are asked for."""
    steps = [list(range(len(rows)))] * 2 + [list(range(1, len(rows)))]
    said: list[list[SequenceOutput]] = []
    under_way, before = None, []
    for i, requests in enumerate(steps):
        inputs = [
            SequenceInput(
                [5 + r] if under_way is None else [0],
                bed.lengths[r] + i,
                bed.pages[r],
                rows[r],
                follows=None if under_way is None else before.index(r),
            )
            for r in requests
        ]
        started = runner.start(inputs, 0, under_way)
        assert started.leads
        if under_way is not None:
            said.append(list(under_way.outputs()))
            take([rows[r] for r in before], said[-1])
        started.choose([True] * len(requests))
        under_way, before = started, requests
    assert under_way is not None
    return [*said, list(under_way.outputs())]


def steps_of(
    bed: Bed, runner: ModelRunner, rows: Sequence[SampleInput]
) -> list[list[SequenceOutput]]:
    """Three steps of all requests, one after the other."""
    steps = []
    for i in range(3):
        inputs = [
            SequenceInput([[5 + r, *row.output_ids][-1]], bed.lengths[r] + i, bed.pages[r], row)
            for r, row in enumerate(rows)
        ]
        steps.append(runner.run(inputs, 0))
        take(rows, steps[-1])
    return steps


ASKED: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 2,
    "drawn": [{"temperature": 0.8}] * 2,
    "greedy and drawn": [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}],
    "ruled": [
        {"temperature": 0.0, "logprobs": 2, "logit_bias": {9: 1.0}, "frequency_penalty": 1.0},
        {"temperature": 0.8, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [4, 9]},
        {"temperature": 0.0, "logprobs": 0, "thinking_budget": 1, "end_think_id": 30},
        {"temperature": 0.7},
    ],
}
GRAMMAR = "start: /[a-z]{2,9}/"


@pytest.mark.parametrize("kind", ASKED)
def test_a_step_started_ahead_says_the_same(kind):
    asked = ASKED[kind]
    grammar = GRAMMAR if kind == "ruled" else None
    bed = Bed([4, 18, 6, 9][: len(asked)])
    eager, replaying = runners_of(bed)
    expected = steps_of(bed, eager, rows_of(asked, grammar))
    found = speak_ahead(bed, replaying, rows_of(asked, grammar))
    for own, others in zip(found, [*expected[:2], expected[2][1:]], strict=True):
        for output, other in zip(own, others, strict=True):
            assert output.token_ids == other.token_ids
            assert_scores(output, other)
    work = "greedy" if kind == "greedy" else "layers"
    assert {shape.work for shape in bed.graphs.shapes} == {work}


def assert_scores(output: SequenceOutput, other: SequenceOutput) -> None:
    """As many alternatives of nearly the same logprobs."""
    pairs = list(zip(output.logprobs, other.logprobs, strict=True))
    for score, wanted in pairs:
        assert len(score.top_ids) == len(wanted.top_ids)
        assert score.logprob == pytest.approx(wanted.logprob, abs=ATOL)
        assert score.top_logprobs == pytest.approx(wanted.top_logprobs, abs=ATOL)


def test_a_row_that_is_computed_too_many_is_chosen_by_nothing():
    class Ended:
        def mask(self) -> bytes:
            raise AssertionError("a request that has ended is asked for a mask")

        def after(self, draft_ids: Sequence[int]) -> Constraint:
            raise AssertionError("nothing is drafted here")

    bed = Bed([4, 18])
    _, replaying = runners_of(bed)
    ended = SampleInput(GREEDY, [1], [], Ended())
    inputs = [
        SequenceInput([5], length, pages, row)
        for length, pages, row in zip(
            bed.lengths, bed.pages, (ended, SampleInput(GREEDY, [1], [])), strict=True
        )
    ]
    alone = replaying.run(inputs[1:], 0)
    started = replaying.start(inputs, 0)
    with pytest.raises(RuntimeError, match="no tokens were chosen"):
        started.outputs()
    started.choose([False, True])
    assert started.outputs()[1:] == alone


def test_a_step_behind_one_that_cannot_be_followed_is_refused():
    bed = Bed([4])
    eager, replaying = runners_of(bed)
    row = SampleInput(GREEDY, [1], [])
    first = [SequenceInput([5], 4, bed.pages[0], row)]
    led = replaying.start(first, 0)
    led.choose([True])
    drafting, plain = (
        SequenceInput([0], 5, bed.pages[0], row, num_to_draft=n, follows=0) for n in (1, 0)
    )
    for sequence, behind in ((drafting, led), (plain, Computed(led.outputs(), leads=True))):
        with pytest.raises(ValueError, match="cannot be replayed"):
            replaying.start([sequence], 0, behind)
    assert not eager.start(first, 0).leads


def test_keys_of_replayed_steps_are_counted():
    bed = Bed([4, 18])
    for runner in runners_of(bed):
        inputs = [
            SequenceInput([5], length, pages, SampleInput(GREEDY, [1], []))
            for length, pages in zip(bed.lengths, bed.pages, strict=True)
        ]
        started = runner.start(inputs, 0)
        started.choose([True, True])
        started.outputs()
    eager, replayed = (backend.clock.counts for backend in bed.backends)
    assert eager.num_rows == replayed.num_rows == 2
    assert eager.num_keys == replayed.num_keys == 5 + bed.backends[0].size.topk


def test_guesses_are_replayed_as_well():
    bed = Bed([4, 18], guesses=True)
    runs = (speak(bed, runner, GREEDY, steps=2, num_to_draft=2) for runner in runners_of(bed))
    eager, replayed = runs
    assert eager == replayed
    assert all(len(drafts) == 4 for _, drafts in replayed)
    # The first step brings one token a request, the second verifies two drafts; a guess goes on.
    kinds = {(shape.work, shape.width) for shape in bed.graphs.shapes}
    assert kinds == {("greedy", 1), ("guess", 1), ("greedy", 3), ("guess", 3)}


def test_where_nobody_drafts_only_the_rows_of_guesses_are_replayed():
    bed = Bed([4, 18], guesses=True)
    for runner in runners_of(bed):
        speak(bed, runner, GREEDY, steps=3)
    assert {shape.work for shape in bed.graphs.shapes} == {"greedy", "rows"}
    bed.check_rows()


def test_the_shape_used_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(decode_graphs, "MOST_SHAPES", 2)
    bed = Bed([3, 4, 5])
    for requests in ([0, 1, 2], [1], [0, 1, 2], [0, 1]):
        bed.step(requests)
    bed.check_rows()
    assert [shape.requests for shape in bed.graphs.shapes] == [4, 2]


def test_a_request_whose_logits_are_no_numbers_fails_alone():
    bed = Bed([4, 18])
    for storage in bed.storages:
        storage.latent_LSC[:, bed.pages[0][0] * PAGE] = float("nan")
    for runner in runners_of(bed):
        inputs = [
            SequenceInput([5], length, pages, SampleInput(GREEDY, [1], []))
            for length, pages in zip(bed.lengths, bed.pages, strict=True)
        ]
        broken, well = runner.run(inputs, 0)
        assert broken.error == NON_FINITE and not broken.token_ids
        assert well.error is None and len(well.token_ids) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_greedy_step_waits_for_nothing_but_its_tokens():
    """Every other wait for the device is an error here."""
    bed = Bed([4, 18])
    runner = runners_of(bed)[1]
    speak(bed, runner, GREEDY, steps=3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        speak(bed, runner, GREEDY, steps=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", ASKED)
def test_a_step_is_started_ahead_without_waiting(kind):
    asked = ASKED[kind]
    grammar = GRAMMAR if kind == "ruled" else None
    bed = Bed([4, 18, 6, 9][: len(asked)])
    runner = runners_of(bed)[1]
    expected = speak_ahead(bed, runner, rows_of(asked, grammar))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = speak_ahead(bed, runner, rows_of(asked, grammar))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ids = [[[o.token_ids for o in step] for step in steps] for steps in (found, expected)]
    assert ids[0] == ids[1]


def test_too_many_requests_run_eagerly():
    bed = Bed([5])
    assert (
        bed.graphs.forward([0] * (LARGEST_REPLAYED + 1), [Span(1, 1, [1])] * (LARGEST_REPLAYED + 1))
        is None
    )
    assert SIZES[-1] == LARGEST_REPLAYED and list(SIZES) == sorted(set(SIZES))


def test_a_backend_that_waits_for_the_host_is_refused():
    bed = Bed([5])
    with pytest.raises(ValueError, match="torch cannot be replayed"):
        DecodeGraphs(bed.model, TorchDenseBackend(bed.storages[0]), bed.storages[0], run_again)


def test_usual_shapes_are_captured_ahead():
    bed = Bed([13, 5], guesses=True)
    runner = ModelRunner(bed.model, bed.backends[1], bed.storages[1], bed.graphs)
    said = list(runner.prepare(2, 1, 12))
    assert said == [f"{size} requests of {width} tokens" for width in (1, 2) for size in (1, 2)]
    made = {(shape.requests, shape.width, shape.work) for shape in bed.graphs.shapes}
    assert made == {(n, w, work) for n in (1, 2) for w in (1, 2) for work in ("greedy", "guess")}
    bed.step([0, 1])
    bed.check_rows()


def test_what_is_captured_ahead_pushes_nothing_out(monkeypatch):
    monkeypatch.setattr(decode_graphs, "MOST_SHAPES", 2)
    bed = Bed([5])
    runner = ModelRunner(bed.model, bed.backends[1], bed.storages[1], bed.graphs)
    assert len(list(runner.prepare(4, 1, 12))) == 2
    assert [(shape.requests, shape.width) for shape in bed.graphs.shapes] == [(1, 1), (2, 1)]


def test_a_length_that_selects_is_captured_beside_the_usual_one(monkeypatch):
    bed = Bed([5])
    monkeypatch.setattr(runner_module, "USUAL_LENGTH", 9)
    runner = ModelRunner(bed.model, bed.backends[1], bed.storages[1], bed.graphs)
    assert len(list(runner.prepare(1, 0, 20))) == 2
    assert [shape.selects for shape in bed.graphs.shapes] == [False, True]


@torch.inference_mode()
def test_short_requests_share_one_shape():
    """Were their block tables as short as they are, each length would be compiled and captured."""
    bed = Bed([40])
    storage = bed.storages[1]
    graphs = DecodeGraphs(
        bed.model, TritonDenseBackend(storage), storage, None if HAS_GPU else run_again
    )
    for length in (9, 20, 40):
        assert graphs.forward([1], [Span(length, 1, bed.pages[0])]) is not None
    assert [shape.pages for shape in graphs.shapes] == [USUAL_LENGTH // PAGE]
