"""Decode steps captured as CUDA graphs: one launch for a step instead of hundreds.

An eager launch costs the host tens of microseconds, and a decode step has dozens a layer: below a
large batch the GPU would wait for the host. A graph replays the launches of one shape, so steps are
padded to few shapes: a number of requests, tokens a request, pages that the block table has room
for, dense or selecting. The usual ones are captured at the start (`prepare`), others when they
first come up. What changes from step to step lies in tensors that keep their place
(`captured_step.py`), and in the backend's plan, which is refreshed in place. A padding request sees
nothing and writes to page 0.

Where all requests are greedy the choice of tokens is a part of the graph; where logits are needed
they are made from the hidden states behind it. A guess of the MTP layer is a graph of its own, and
so is what is left of it where nobody wants a draft: its rows. Of more shapes than the memory plan
counts with, the one that was used longest ago is forgotten.

Nothing here decides by data on the device; a step that no graph suits runs eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from ..attention.base import AttentionBackend
from ..kv_cache.storage import CacheStorage
from .captured_step import Captured, Replayed, Run, Shape, StepInputs, Tokens, Work, step_batch
from .deepseek import DeepseekModel
from .inputs import Span
from .step_memory import LARGEST_REPLAYED, MOST_SHAPES

# Tokens of a request that every block table without selections has room for, so that short requests
# share one shape.
USUAL_LENGTH = 1024
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, LARGEST_REPLAYED + 1, 16))


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
        """What is captured, in the order of last use."""
        return tuple(self._captured)

    def prepare(self, requests: int, width: int, lengths: Sequence[int]) -> Iterator[str]:
        """Capture what so many greedy requests need, `width` tokens each, of these lengths.

        Says what comes next. Other lengths and other sampling are captured as they come up; kernels
        for them are then compiled, which takes longest. Ends early where as many are there as are
        kept.
        """
        sizes = SIZES[: 1 + bisect_left(SIZES, min(requests, LARGEST_REPLAYED))]
        for size, length in product(sizes, (n for n in lengths if n >= width)):
            if len(self._captured) >= MOST_SHAPES:
                return
            pages = -(-length // self._storage.page_size)
            # Page 0 takes all of it, and whatever is there may be attended to.
            spans = [Span(length - width, width, [0] * pages)] * size
            yield f"{size} requests of {width} tokens"
            self.forward([0] * (size * width), spans, greedy=True)
            if self._model.mtp is not None:
                model, shape = self._model, (size * width, self._model.config.hidden_size)
                hidden_TD = torch.zeros(shape, dtype=model.dtype, device=model.device)
                self.guess([0] * (size * width), hidden_TD, spans)

    def forward(
        self, tokens: Tokens, spans: Sequence[Span], *, greedy: bool = False
    ) -> Replayed | None:
        """Hidden states of decodes, or None where they are to run eagerly.

        spans: of as many tokens each. greedy: the likeliest token of each row is chosen, too.
        """
        return self._run(tokens, spans, "greedy" if greedy else "layers", None)

    def guess(
        self, next_ids: Sequence[int], hidden_TD: Tensor, spans: Sequence[Span]
    ) -> Replayed | None:
        """What the MTP layer makes of hidden states and the tokens behind them, and its guesses."""
        return self._run(next_ids, spans, "guess", hidden_TD)

    def write_guess_rows(
        self, next_ids: Sequence[int], hidden_TD: Tensor, spans: Sequence[Span]
    ) -> bool:
        """Write the rows of a guess without its results; False where that is to be done eagerly."""
        return self._run(next_ids, spans, "rows", hidden_TD) is not None

    def _run(
        self, tokens: Tokens, spans: Sequence[Span], work: Work, hidden_TD: Tensor | None
    ) -> Replayed | None:
        if len(spans) > LARGEST_REPLAYED:
            return None
        shape = self._shape(spans, work)
        captured = self._captured.pop(shape, None) or self._new(shape, spans)
        while len(self._captured) >= MOST_SHAPES:
            # A graph that is still being replayed is taken down when it is done.
            del self._captured[next(iter(self._captured))]
        self._captured[shape] = captured
        captured.inputs.write(tokens, spans, self._storage.page_size)
        if hidden_TD is not None:
            captured.inputs.write_hidden(hidden_TD)
        captured.refresh(self._backend, shape, spans)
        return captured.run(sum(span.num_tokens for span in spans))

    def _shape(self, spans: Sequence[Span], work: Work) -> Shape:
        longest = max(span.stop for span in spans)
        pages = -(-longest // self._storage.page_size)
        requests = SIZES[bisect_left(SIZES, len(spans))]
        selects, room = self._backend.selects(longest), 1 << (pages - 1).bit_length()
        if not selects and not self._backend.selects(USUAL_LENGTH):
            room = max(room, USUAL_LENGTH // self._storage.page_size)
        return Shape(requests, spans[0].num_tokens, room, selects, work)

    def _new(self, shape: Shape, spans: Sequence[Span]) -> Captured:
        """Capture a shape over page 0 alone, with the longest requests it stands for.

        The plan shares their keys out among as many programs as it will ever need.
        """
        longest = shape.pages * self._storage.page_size
        if self._backend.selects(longest) != shape.selects:
            longest = max(span.stop for span in spans)
        inputs = StepInputs.of(shape, self._model.config.hidden_size, self._storage)
        contexts = (longest - shape.width,) * shape.requests
        plan = self._backend.plan(step_batch(inputs, shape, contexts))
        context = plan, self._backend, self._storage

        def layers() -> Tensor:
            if inputs.hidden_TD is None:
                return self._model.forward(inputs.ids_4T[0], *context)
            if shape.work == "guess":
                return self._model.guess(inputs.ids_4T[0], inputs.hidden_TD, *context)
            self._model.write_guess_rows(inputs.ids_4T[0], inputs.hidden_TD, *context)
            return inputs.hidden_TD

        hidden_TD, chosen_T = layers().clone(), None
        if shape.work in ("greedy", "guess"):
            chosen_T = self._model.greedy(hidden_TD)

        def run() -> None:
            hidden_TD.copy_(layers())
            if chosen_T is not None:
                chosen_T.copy_(self._model.greedy(hidden_TD))

        return Captured(inputs, plan, self._capture(run), hidden_TD, chosen_T)


class CudaCapture:
    """Captures into one pool of memory, which all graphs share: they never run at the same time.

    torch.cuda.graph would give all cached memory back to the driver before each capture, and takes
    twice as long.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay
