"""Replayed decode steps against eager ones: padding, lengths that grow, dense and selecting.

With a GPU the graphs are captured; without one a replay runs the same work again over the same
tensors, which shows whether everything that changes between steps is written into them.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from checkpoints import T_CPU, new_folder, tensors_of
from kernel_bed import DEVICE, HAS_GPU
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.dense.triton import TritonDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model.checkpoint import read_config
from minidsa.model.decode_graphs import LARGEST, SIZES, DecodeGraphs, Run
from minidsa.model.inputs import Span, attention_batch, to_tensor
from minidsa.model.loader import load_model
from minidsa.model.make_checkpoint import write_checkpoint
from minidsa.model.runner import ModelRunner
from minidsa.model.sequence import SampleInput, SequenceInput
from stepper import new_storage

# Capturing reads page 0, which is full of NaN here, and the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")

# What is served over kernels; torch's grouped products of fp32 wait for the host.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
RTOL, ATOL = (3e-2, 6e-2) if HAS_GPU else (2e-4, 2e-4)
PAGE = 16
PAGES = 40


@functools.cache
def two_layers() -> Path:
    folder = new_folder()
    config = dict(T_CPU) | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    write_checkpoint(folder, config, tensors_of(config))
    return folder


def again(run: Run) -> Run:
    return run


class Bed:
    """One model over two caches with the same rows: one is stepped eagerly, the other replayed."""

    def __init__(self, lengths: Sequence[int]) -> None:
        config = read_config(two_layers())
        self.model = load_model(two_layers(), config, DTYPE, DEVICE)
        assert config.indexer is not None
        topk = config.indexer.topk
        self.storages = [new_storage(self.model, PAGES, PAGE) for _ in range(2)]
        self.backends = [DsaBackend(TritonDenseBackend(s), s, topk) for s in self.storages]
        capture = None if HAS_GPU else again
        self.graphs = DecodeGraphs(self.model, self.backends[1], self.storages[1], capture)
        order = (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
        each = (PAGES - 1) // len(lengths)
        self.pages = [order[i * each : (i + 1) * each] for i in range(len(lengths))]
        self.lengths = list(lengths)
        for length, pages in zip(lengths, self.pages, strict=True):
            ids = [(7 * i + length) % 500 for i in range(length)]
            for backend, storage in zip(self.backends, self.storages, strict=True):
                self._eager(backend, storage, ids, [Span(0, length, pages)], 1)

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
        torch.testing.assert_close(replayed, expected, rtol=RTOL, atol=ATOL)
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


def test_a_runner_says_the_same_tokens_with_graphs():
    bed = Bed([13, 30])
    runners = [
        ModelRunner(bed.model, backend, storage, graphs)
        for backend, storage, graphs in zip(
            bed.backends, bed.storages, (None, bed.graphs), strict=True
        )
    ]
    greedy = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    said = []
    for runner in runners:
        tokens = [[5], [6]]
        for step in range(3):
            inputs = [
                SequenceInput(
                    [own[-1]],
                    bed.lengths[i] + step,
                    bed.pages[i],
                    SampleInput(greedy, [1], own[1:]),
                )
                for i, own in enumerate(tokens)
            ]
            for own, output in zip(tokens, runner.run(inputs, 0), strict=True):
                own += output.token_ids
        said.append(tokens)
    assert said[0] == said[1]
    assert bed.graphs.shapes


def test_too_many_requests_run_eagerly():
    bed = Bed([5])
    assert bed.graphs.forward([0] * (LARGEST + 1), [Span(1, 1, [1])] * (LARGEST + 1)) is None
    assert SIZES[-1] == LARGEST and list(SIZES) == sorted(set(SIZES))


def test_a_backend_that_waits_for_the_host_is_refused():
    bed = Bed([5])
    with pytest.raises(ValueError, match="torch cannot be replayed"):
        DecodeGraphs(bed.model, TorchDenseBackend(bed.storages[0]), bed.storages[0], again)
