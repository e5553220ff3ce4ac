"""Steps with prompt chunks, replayed from one attention to the next, against eager ones.

With a GPU the pieces are captured; without one a replay runs the same work again over the same
tensors.
"""

from collections.abc import Sequence

import pytest
import torch

from checkpoints import t_cpu
from kernel_bed import DEVICE, HAS_GPU, run_again
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.dense.triton import TritonDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model.checkpoint import read_config
from minidsa.model.decode_graphs import CudaCapture
from minidsa.model.inputs import Span, attention_batch, to_tensor
from minidsa.model.layer_graphs import SIZES, LayerGraphs
from minidsa.model.loader import load_model
from minidsa.model.runner import ModelRunner
from minidsa.model.sequence import SampleInput, SequenceInput
from minidsa.model.step_memory import LARGEST_CHUNK, MOST_CHUNKS
from stepper import new_storage

DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
RTOL, ATOL = (3e-2, 6e-2) if HAS_GPU else (2e-4, 2e-4)
PAGE, PAGES = 16, 40
GREEDY = SamplingParams(max_tokens=9, seed=0, temperature=0.0)

# Requests of a step: context and new tokens. Those of one token, behind the others, are decodes.
Step = Sequence[tuple[int, int, int]]


class Bed:
    """One model over two caches: one is stepped eagerly, the other in pieces."""

    def __init__(self, *, most_tokens: int = 256) -> None:
        config = read_config(t_cpu())
        self.model = load_model(t_cpu(), config, DTYPE, DEVICE)
        assert config.indexer is not None
        self.storages = [new_storage(self.model, PAGES, PAGE) for _ in range(2)]
        # What lies between two attentions does not depend on who attends; here torch is faster.
        dense = TritonDenseBackend if HAS_GPU else TorchDenseBackend
        self.backends = [DsaBackend(dense(s), s, config.indexer.topk) for s in self.storages]
        made = CudaCapture() if HAS_GPU else run_again
        self.graphs = LayerGraphs(self.model, self.backends[1], self.storages[1], most_tokens, made)
        self.runners = [
            ModelRunner(self.model, backend, storage, None, graphs)
            for backend, storage, graphs in zip(
                self.backends, self.storages, (None, self.graphs), strict=True
            )
        ]

    @torch.inference_mode()
    def step(self, step: Step) -> None:
        """(request, context, new tokens), extends first, both ways; results must agree."""
        spans = [Span(context, new, self.pages(request)) for request, context, new in step]
        ids = [(7 * i + 3 * s.context_len) % 500 for s in spans for i in range(s.num_tokens)]
        num_extends = sum(new > 1 for *_, new in step)
        results = []
        for runner in self.runners:
            batch = attention_batch(spans, num_extends, PAGE, DEVICE)
            results.append(runner._forward(to_tensor(ids, DEVICE), runner.backend.plan(batch)))
        torch.testing.assert_close(results[1], results[0], rtol=RTOL, atol=ATOL)
        self.check_rows()

    def pages(self, request: int) -> list[int]:
        return list(range(1 + 12 * request, 13 + 12 * request))

    def check_rows(self) -> None:
        eager, replayed = (s.latent_LSC[:, PAGE:] for s in self.storages)
        torch.testing.assert_close(replayed, eager, rtol=RTOL, atol=ATOL, equal_nan=True)


def index_rows(storage: CacheStorage) -> torch.Tensor:
    rows_SD = storage.index_k[0]
    assert rows_SD is not None
    return rows_SD[PAGE:]


def test_prompts_chunks_and_decodes_in_one_step():
    """Sizes change from step to step, and what a larger one left is not seen by a smaller one."""
    bed = Bed()
    bed.step([(0, 0, 100), (1, 0, 5)])
    bed.step([(2, 0, 9), (1, 5, 1)])
    bed.step([(0, 100, 37), (1, 6, 1), (2, 9, 1)])
    bed.step([(2, 10, 2)])
    torch.testing.assert_close(*map(index_rows, bed.storages), rtol=RTOL, atol=ATOL, equal_nan=True)


def test_from_dense_to_selecting():
    """With index_topk 16, a part of a step selects and the other does not."""
    bed = Bed()
    for context in range(0, 40, 8):
        bed.step([(0, context, 8)])
    bed.step([(1, 0, 9), (0, 40, 1)])
    bed.step([(1, 9, 30), (0, 41, 1)])


def test_a_number_that_leaves_a_padding_row_alone_is_finite():
    """A row that was no number in one step is padding in the next, where nobody sees it."""
    bed = Bed()
    bed.step([(0, 0, 30)])
    with torch.inference_mode():
        bed.graphs._room.heads_THV.fill_(float("nan"))
    bed.step([(1, 0, 4)])
    # Padding is written to the first slot of page 0, and what is written are numbers.
    assert bed.storages[1].latent_LSC[:, 0].isfinite().all()


def test_longer_steps_run_eagerly():
    bed = Bed(most_tokens=80)
    assert bed.graphs.sizes == (64, 80)
    bed.step([(0, 0, 81)])
    assert bed.graphs.captured == ()
    bed.step([(1, 0, 80)])
    assert bed.graphs.captured == ((80, True),)
    assert SIZES[-1] == LARGEST_CHUNK and list(SIZES) == sorted(set(SIZES))
    # What the memory plan counts with: each with selections and without.
    assert 2 * len(SIZES) == MOST_CHUNKS


@pytest.mark.parametrize("length", [9, 33])
def test_a_runner_samples_the_same(length):
    bed = Bed()
    ids = [(5 * i) % 500 for i in range(length)]
    said = [
        runner.run([SequenceInput(ids, 0, bed.pages(0), SampleInput(GREEDY, ids, []))], 1)
        for runner in bed.runners
    ]
    assert said[0][0].token_ids == said[1][0].token_ids and len(said[0][0].token_ids) == 1


def test_all_sizes_can_be_made_ahead():
    bed = Bed(most_tokens=100)
    with torch.inference_mode():
        said = [*bed.graphs.prepare(selects=False), *bed.graphs.prepare(selects=True)]
    assert said == ["64 tokens", "100 tokens"] * 2
    assert len(bed.graphs.captured) == 4
    bed.step([(0, 0, 70)])
    assert len(bed.graphs.captured) == 4
