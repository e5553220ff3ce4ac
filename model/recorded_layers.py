"""Steps of few tokens on a CPU: what lies between two attentions, recorded once.

A layer is about a hundred operations, and with few tokens Python takes as long to ask for them as
the processor to compute them. What lies between two attentions depends on nothing but the number of
tokens (see `layer_graphs.py`, which does the same on a GPU): piece i goes from what layer i - 1
attended to up to the queries of layer i. Once recorded, torch runs it without Python, operation by
operation as before: a request's bits are the same.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.jit._fuser import optimized_execution
from torch.overrides import TorchFunctionMode

from ..attention.base import AttentionBackend, IndexQuery, Plan, Query
from ..kv_cache.storage import CacheStorage
from .deepseek import DeepseekModel
from .layers.decoder import DecoderLayer
from .layers.mla import Rows, Step
from .layers.moe import Moe
from .layers.norm import RmsNorm

# With more, the host's part of a step is small.
MOST_TOKENS = 8

Piece = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Stack:
    """Layers one behind the other, what makes their input, and the norm behind the last."""

    enter: Callable[..., Tensor]
    layers: Sequence[DecoderLayer]
    norm: RmsNorm


class RecordedLayers:
    """The layers of a model, and its MTP layer, for decode steps of up to MOST_TOKENS tokens.

    A number of tokens is recorded when it first comes up, which takes as long as some ten steps.
    """

    def __init__(
        self, model: DeepseekModel, backend: AttentionBackend, storage: CacheStorage
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._angles_PR = model.angles_PR
        self._selects = model.config.indexer is not None
        self._stacks = {"forward": Stack(model.embedding, model.layers, model.norm)}
        if (mtp := model.mtp) is not None:
            join = partial(_join, model)
            self._stacks["guess"] = Stack(join, [mtp.layer], mtp.norm)
        self._pieces: dict[tuple[str, int], list[Piece]] = {}

    @staticmethod
    def suit(model: DeepseekModel, storage: CacheStorage) -> bool:
        """Whether a layer's operations on few tokens are the same whatever the tokens are.

        torch records nothing from Python 3.14 on.
        """
        layers = [*model.layers, *([model.mtp.layer] if model.mtp else [])]
        moes = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Moe)]
        is_plain = model.device.type == "cpu" and model.dtype == torch.float32
        is_fixed = is_plain and not storage.layout.is_fp8 and all(moe.gathers for moe in moes)
        return is_fixed and sys.version_info < (3, 14)

    @property
    def recorded(self) -> tuple[tuple[str, int], ...]:
        """What was recorded, "forward" or "guess", and for how many tokens."""
        return tuple(self._pieces)

    def forward(self, token_ids_T: Tensor, plan: Plan) -> Tensor | None:
        """As `DeepseekModel.forward`; None where nothing is recorded."""
        return self._run("forward", plan, token_ids_T)

    def guess(self, next_ids_T: Tensor, hidden_TD: Tensor, plan: Plan) -> Tensor | None:
        """As `DeepseekModel.guess`; None where nothing is recorded."""
        return self._run("guess", plan, next_ids_T, hidden_TD)

    def _run(self, name: str, plan: Plan, *inputs: Tensor) -> Tensor | None:
        batch, stack = plan.batch, self._stacks[name]
        key = name, batch.slots_T.shape[0]
        if batch.num_extends or key[1] > MOST_TOKENS:
            return None
        if key not in self._pieces:
            self._pieces[key] = self._new(stack)
        begin, *others = self._pieces[key]
        # Without the optimiser of graphs, which takes long and finds nothing here.
        with optimized_execution(False):
            x_TD, angles_TR, *q = begin(batch.positions_T, batch.slots_T, *inputs)
            step = Step(plan, self._backend, self._rows(batch.slots_T, angles_TR))
            for layer, go_on in zip(stack.layers, others, strict=True):
                heads_THV = step.attend(layer.attention.layer, _query(q))
                q = go_on(x_TD, heads_THV, batch.slots_T, angles_TR)
        [hidden_TD] = q
        return hidden_TD

    def _rows(self, slots_T: Tensor, angles_TR: Tensor) -> Rows:
        """Queries always have their index part, so that one recording serves every length."""
        return Rows(self._storage, slots_T, angles_TR, self._selects)

    def _new(self, stack: Stack) -> list[Piece]:
        """Up to the first queries, from there to those of each layer behind it, and to the end."""
        first, last = stack.layers[0], stack.layers[-1]

        def begin(positions_T: Tensor, slots_T: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            angles_TR = self._angles_PR.index_select(0, positions_T)
            x_TD = stack.enter(*inputs)
            rows = self._rows(slots_T, angles_TR)
            return x_TD, angles_TR, *_tensors(first.queries(x_TD, None, rows))

        def between(
            layer: DecoderLayer, following: DecoderLayer, x_TD: Tensor, heads_THV: Tensor,
            slots_T: Tensor, angles_TR: Tensor,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            rows = self._rows(slots_T, angles_TR)
            return _tensors(following.queries(x_TD, layer.finish(x_TD, heads_THV), rows))

        def end(x_TD: Tensor, heads_THV: Tensor, *_: Tensor) -> tuple[Tensor]:
            return (stack.norm.add(x_TD, last.finish(x_TD, heads_THV)),)

        return [
            Recorder(begin, self._planes(first)),
            *(
                Recorder(partial(between, layer, following), self._planes(following))
                for layer, following in pairwise(stack.layers)
            ),
            Recorder(end, []),
        ]

    def _planes(self, layer: DecoderLayer) -> list[Tensor]:
        """What a layer's rows are written to."""
        index_k = self._storage.index_k[layer.attention.index]
        return [self._storage.latent_LSC, *([] if index_k is None else [index_k])]


class Recorder:
    """A function that is recorded by its first call; the inputs of all calls have its shapes.

    written: tensors beside the inputs that it writes to. A recording holds what else it reads as
    constants, and believes that those stay as they are.
    """

    def __init__(self, function: Piece, written: Sequence[Tensor]) -> None:
        self._function = function
        self._beside = list(written)
        self._recorded: Piece | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._recorded is None:
            self._recorded = self._record([x.clone() for x in inputs])
        return self._recorded(*inputs, *self._beside)

    def _record(self, inputs: Sequence[Tensor]) -> Piece:
        """Compute twice on copies of the inputs: once to find packed weights, which must be inputs
        of a recording, and once to record. Both times the rows that are written are the same."""
        with _Packed() as packed:
            self._function(*[x.clone() for x in inputs])
        self._beside += packed.weights
        function, count = self._function, len(inputs)
        with warnings.catch_warnings():
            # One says that a number of tokens becomes a constant, one that torch would rather
            # compile, for which a machine needs a compiler.
            warnings.simplefilter("ignore")
            recorded: Any = torch.jit.trace(
                lambda *given: function(*given[:count]), (*inputs, *self._beside), check_trace=False
            )
        return recorded


class _Packed(TorchFunctionMode):
    """Collects the weights in oneDNN's layout that products meet."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        self.weights += [x for x in args if isinstance(x, Tensor) and x.is_mkldnn]
        return func(*args, **(kwargs or {}))


def _join(model: DeepseekModel, next_ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
    return model.mtp_layer.joined(model.embedding(next_ids_T), hidden_TD)


def _tensors(q: Query) -> tuple[Tensor, ...]:
    index = () if q.index is None else (q.index.q_TnD, q.index.weights_Tn)
    return q.nope_THN, q.rope_THR, *index


def _query(tensors: Sequence[Tensor]) -> Query:
    nope_THN, rope_THR, *index = tensors
    return Query(nope_THN, rope_THR, IndexQuery(*index) if index else None)
