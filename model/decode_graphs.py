"""Decode steps captured as CUDA graphs: one launch for the layers instead of hundreds.

An eager launch costs the host tens of microseconds, and a decode step has dozens a layer: below a
large batch the GPU would wait for the host. A graph replays the launches of one shape, so steps are
padded to few shapes: a number of requests, tokens a request, pages that the block table has room
for, dense or selecting. A graph is captured when its shape first comes up. What changes from step
to step lies in tensors that keep their place: token ids, positions, slots, and the backend's plan,
which is refreshed in place. A padding request sees nothing and writes to page 0.

Nothing here decides by data on the device; a step that no graph suits runs eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.base import AttentionBackend, Plan
from ..attention.metadata import AttentionBatch
from ..kv_cache.block_table import token_slots
from ..kv_cache.storage import CacheStorage
from .deepseek import DeepseekModel
from .inputs import Span

# Beyond so many requests the GPU is busy enough for the host to keep ahead of it.
LARGEST = 256
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, LARGEST + 1, 16))

Run = Callable[[], None]


class Shape(NamedTuple):
    """requests and pages are those of the padded step."""

    requests: int
    width: int
    pages: int
    selects: bool


@dataclass
class Captured:
    """One shape: the tensors that a step is written into, the plan over them, and the result.

    pages: those of each request as they were written last; most steps change few of them.
    """

    batch: AttentionBatch
    token_ids_T: Tensor
    plan: Plan
    replay: Run
    hidden_TD: Tensor
    table_BP: Tensor
    pages: list[list[int]]

    def write_table(self, spans: Sequence[Span]) -> None:
        """Bring the block table on the host up to date, and copy it if anything changed."""
        table, room, changed = self.table_BP.numpy(), self.table_BP.shape[1], False
        for row, written in enumerate(self.pages):
            pages = list(spans[row].pages[:room]) if row < len(spans) else []
            if pages != written:
                table[row, : len(pages)] = pages
                table[row, len(pages) :] = 0
                self.pages[row] = pages
                changed = True
        if changed:
            self.batch.block_table_BP.copy_(self.table_BP, non_blocking=True)


class DecodeGraphs:
    """The layers of a model, for steps of nothing but decodes.

    capture: makes a replay of a function's work on the device; tests without a GPU pass another.
    Raises ValueError for a backend whose decodes cannot be replayed.
    """

    def __init__(
        self,
        model: DeepseekModel,
        backend: AttentionBackend,
        storage: CacheStorage,
        capture: Callable[[Run], Run] | None = None,
    ) -> None:
        if not backend.replayable:
            raise ValueError(f"decodes of the backend {backend.name} cannot be replayed")
        self._model = model
        self._backend = backend
        self._storage = storage
        self._capture = capture or CudaCapture()
        self._captured: dict[Shape, Captured] = {}

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """What was captured, in the order of first use."""
        return tuple(self._captured)

    def forward(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor | None:
        """Hidden states [T, D] of decodes, or None where they are to run eagerly.

        spans: of as many tokens each. The result is overwritten by the next step of its shape.
        """
        if len(spans) > LARGEST:
            return None
        shape = self._shape(spans)
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = self._new(shape, spans)
        self._write(captured, shape, token_ids, spans)
        captured.replay()
        return captured.hidden_TD[: len(token_ids)]

    def _shape(self, spans: Sequence[Span]) -> Shape:
        longest = max(span.stop for span in spans)
        pages = -(-longest // self._storage.page_size)
        requests = SIZES[bisect_left(SIZES, len(spans))]
        selects = self._backend.selects(longest)
        return Shape(requests, spans[0].num_tokens, 1 << (pages - 1).bit_length(), selects)

    def _new(self, shape: Shape, spans: Sequence[Span]) -> Captured:
        """Capture a shape over page 0 alone, with the longest requests it stands for.

        The plan shares their keys out among as many programs as it will ever need.
        """
        longest = shape.pages * self._storage.page_size
        if self._backend.selects(longest) != shape.selects:
            longest = max(span.stop for span in spans)
        tokens = shape.requests * shape.width
        device = self._storage.latent_LSC.device
        batch = AttentionBatch(
            num_extends=0,
            query_lens=(shape.width,) * shape.requests,
            context_lens=(longest - shape.width,) * shape.requests,
            positions_T=torch.zeros(tokens, dtype=torch.int64, device=device),
            slots_T=torch.arange(tokens, device=device) % self._storage.page_size,
            block_table_BP=torch.zeros(
                shape.requests, shape.pages, dtype=torch.int32, device=device
            ),
        )
        token_ids_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        plan = self._backend.plan(batch)
        hidden_TD = self._model.forward(token_ids_T, plan, self._backend, self._storage).clone()

        def run() -> None:
            hidden_TD.copy_(self._model.forward(token_ids_T, plan, self._backend, self._storage))

        table_BP = torch.zeros(
            shape.requests, shape.pages, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        pages: list[list[int]] = [[] for _ in range(shape.requests)]
        return Captured(batch, token_ids_T, plan, self._capture(run), hidden_TD, table_BP, pages)

    def _write(
        self, captured: Captured, shape: Shape, token_ids: Sequence[int], spans: Sequence[Span]
    ) -> None:
        """Move a step into the tensors of its shape, padded, and refresh the plan."""
        padding, size = shape.requests - len(spans), self._storage.page_size
        positions: list[int] = []
        slots: list[int] = []
        for span in spans:
            positions.extend(range(span.context_len, span.stop))
            slots += token_slots(span.pages, size, span.context_len, span.stop)
        rest = padding * shape.width
        contexts = (*(span.context_len for span in spans), *(-shape.width,) * padding)
        batch = captured.batch
        for target, values in (
            (captured.token_ids_T, [*token_ids, *[0] * rest]),
            (batch.positions_T, positions + [0] * rest),
            (batch.slots_T, slots + [i % size for i in range(rest)]),
        ):
            target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)
        captured.write_table(spans)
        step = AttentionBatch(
            num_extends=0,
            query_lens=batch.query_lens,
            context_lens=contexts,
            positions_T=batch.positions_T,
            slots_T=batch.slots_T,
            block_table_BP=batch.block_table_BP,
        )
        self._backend.plan(step, out=captured.plan)


class CudaCapture:
    """Captures into one pool of memory, which all graphs share: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay
