"""Steps with prompt chunks: CUDA graphs that reach from one attention to the next.

What attention launches depends on the lengths of a step, so steps with prompts are not replayed as
a whole. All that lies between two attentions depends on nothing but the number of tokens: graph i
goes from what layer i - 1 attended to up to the queries of layer i, and attention runs eagerly
between them. That is most of the launches; the host would take longer over them than the GPU over a
few hundred tokens.

A step is padded to one of a few numbers of tokens. Padding stands at position 0 and writes to page
0; nobody attends for it. All sizes work in the first rows of the same tensors.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ..attention.base import AttentionBackend, IndexQuery, Plan, Query
from ..kv_cache.storage import CacheStorage
from .captured_step import Run
from .deepseek import DeepseekModel
from .layers.mla import Rows, Step
from .step_memory import LARGEST_CHUNK

SIZES = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, LARGEST_CHUNK + 1, 256))


@dataclass
class Buffers:
    """What goes from one graph to the next, for so many tokens.

    inputs_3T: ids, positions and slots. x_TD: the residual. heads_THV: what attention found.
    """

    inputs_3T: Tensor
    angles_TR: Tensor
    x_TD: Tensor
    heads_THV: Tensor
    hidden_TD: Tensor
    query: Query

    def first(self, count: int) -> "Buffers":
        """The first rows, in the same memory."""
        return Buffers(
            self.inputs_3T[:, :count],
            self.angles_TR[:count],
            self.x_TD[:count],
            self.heads_THV[:count],
            self.hidden_TD[:count],
            self.query.rows(0, count),
        )


class LayerGraphs:
    """The layers of a model for steps of up to LARGEST_CHUNK tokens.

    most_tokens: of any step. capture: as in `DecodeGraphs`, and it may be the same one.
    """

    def __init__(
        self,
        model: DeepseekModel,
        backend: AttentionBackend,
        storage: CacheStorage,
        most_tokens: int,
        capture: Callable[[Run], Run],
    ) -> None:
        self._model = model
        self._backend = backend
        self._storage = storage
        self._capture = capture
        most = min(most_tokens, LARGEST_CHUNK)
        self._sizes = [size for size in SIZES if size < most] + [most]
        self._captured: dict[tuple[int, bool], list[Run]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    @property
    def captured(self) -> tuple[tuple[int, bool], ...]:
        """Numbers of tokens, and whether queries have their index part."""
        return tuple(self._captured)

    def prepare(self, *, selects: bool) -> Iterator[str]:
        """Capture all sizes; says which comes next."""
        for size in self._sizes:
            yield f"{size} tokens"
            self._pieces_of(size, selects)

    def forward(self, token_ids_T: Tensor, plan: Plan) -> Tensor | None:
        """As `DeepseekModel.forward`; None for more tokens than there is a size for.

        The hidden states are overwritten by the next step.
        """
        count = len(token_ids_T)
        if count > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        first, *others = self._pieces_of(size, plan.selects)
        room, used = self._room, self._room.first(count)
        given = token_ids_T, plan.batch.positions_T, plan.batch.slots_T
        torch.stack(given, out=used.inputs_3T)
        room.inputs_3T[:, count:size].zero_()
        room.heads_THV[count:size].zero_()
        step = Step(plan, self._backend, self._rows(used, plan.selects))
        first()
        for layer, replay in zip(self._model.layers, others, strict=True):
            # Where nothing selects, nobody looks at the index part.
            step.attend(layer.attention.layer, used.query, used.heads_THV)
            replay()
        return used.hidden_TD

    def _pieces_of(self, size: int, selects: bool) -> list[Run]:
        """Replays, captured when the size first comes up."""
        key = size, selects
        if key not in self._captured:
            self._captured[key] = self._new(self._room.first(size), selects)
        return self._captured[key]

    def _rows(self, buffers: Buffers, selects: bool) -> Rows:
        return Rows(self._storage, buffers.inputs_3T[2], buffers.angles_TR, selects)

    def _new(self, buffers: Buffers, selects: bool) -> list[Run]:
        """Capture a size, over page 0 alone; each piece runs once before, to be compiled."""
        buffers.inputs_3T.zero_()
        buffers.heads_THV.zero_()
        replays = []
        for piece in self._pieces(buffers, selects):
            piece()
            replays.append(self._capture(piece))
        return replays

    def _pieces(self, buffers: Buffers, selects: bool) -> list[Run]:
        """Up to the first queries, from there to those of each layer behind it, and to the end."""
        model, rows = self._model, self._rows(buffers, selects)
        ids_T, positions_T, _ = buffers.inputs_3T
        x_TD, layers = buffers.x_TD, model.layers

        def begin() -> None:
            buffers.angles_TR.copy_(model.angles_PR.index_select(0, positions_T))
            x_TD.copy_(model.embedding(ids_T))
            _keep(buffers.query, layers[0].queries(x_TD, None, rows))

        def between(i: int) -> None:
            delta_TD = layers[i].finish(x_TD, buffers.heads_THV)
            _keep(buffers.query, layers[i + 1].queries(x_TD, delta_TD, rows))

        def end() -> None:
            delta_TD = layers[-1].finish(x_TD, buffers.heads_THV)
            buffers.hidden_TD.copy_(model.norm.add(x_TD, delta_TD))

        return [begin, *(partial(between, i) for i in range(len(layers) - 1)), end]

    @cached_property
    def _room(self) -> Buffers:
        """For the largest size. Queries are as they are on a GPU, where no weights are packed."""
        model, tokens = self._model, self._sizes[-1]
        config = model.config
        heads, nope = config.num_heads, config.nope_dim

        def room(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return torch.zeros(tokens, *shape, dtype=dtype, device=model.device)

        index = None
        if config.indexer is not None:
            n = config.indexer.num_heads
            index = IndexQuery(room(n, config.indexer.head_dim), room(n, dtype=torch.float32))
        q_THX = room(heads, nope + config.rope_dim)
        return Buffers(
            torch.zeros(3, tokens, dtype=torch.int64, device=model.device),
            room(*model.angles_PR.shape[1:], dtype=model.angles_PR.dtype),
            room(config.hidden_size),
            room(heads, config.v_dim),
            room(config.hidden_size),
            Query(q_THX[..., :nope], q_THX[..., nope:], index),
        )


def _keep(room: Query, q: Query) -> None:
    room.nope_THN.copy_(q.nope_THN)
    room.rope_THR.copy_(q.rope_THR)
    if room.index is not None and q.index is not None:
        room.index.q_TnD.copy_(q.index.q_TnD)
        room.index.weights_Tn.copy_(q.index.weights_Tn)
