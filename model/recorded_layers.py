"""Steps of few tokens on a CPU: what lies between two attentions, recorded once.

A layer is about a hundred operations, and with few tokens Python takes as long to ask for them as
the processor to compute them. What lies between two attentions depends on nothing but the number of
tokens (see `layer_graphs.py`, which does the same on a GPU): piece i goes from what layer i - 1
attended to up to the queries of layer i. Once recorded, torch runs it without Python, operation by
operation as before: a request's bits are the same. One token is recorded by itself, because its
products are others; one recording serves any larger number.
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
from .layers.elementwise import SHARED_FROM
from .layers.linear import SMALL_STEP
from .layers.mla import Rows, Step
from .layers.moe import Moe
from .layers.norm import RmsNorm

Piece = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Stack:
    """Layers one behind the other, what makes their input, and the norm behind the last."""

    enter: Callable[..., Tensor]
    layers: Sequence[DecoderLayer]
    norm: RmsNorm


class RecordedLayers:
    """The layers of a model, and its MTP layer, for decode steps of up to `most_tokens`.

    What comes up for the first time is recorded then, which takes as long as some ten steps.
    most_tokens: 0 where nothing can be recorded.
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
            self._stacks["write"] = Stack(join, [mtp.layer], mtp.norm)
        self._pieces: dict[tuple[str, bool], list[Piece]] = {}
        self.most_tokens = 0 if storage.layout.is_fp8 else _most_tokens(model)

    @property
    def recorded(self) -> tuple[tuple[str, bool], ...]:
        """What was recorded ("forward", "guess" or "write"), and whether for several tokens."""
        return tuple(self._pieces)

    def forward(self, token_ids_T: Tensor, plan: Plan) -> Tensor | None:
        """As `DeepseekModel.forward`; None where nothing is recorded."""
        return self._run("forward", plan, token_ids_T)

    def guess(self, next_ids_T: Tensor, hidden_TD: Tensor, plan: Plan) -> Tensor | None:
        """As `DeepseekModel.guess`; None where nothing is recorded."""
        return self._run("guess", plan, next_ids_T, hidden_TD)

    def write_guess_rows(self, next_ids_T: Tensor, hidden_TD: Tensor, plan: Plan) -> bool:
        """As `DeepseekModel.write_guess_rows`; False where nothing is recorded."""
        return self._run("write", plan, next_ids_T, hidden_TD) is not None

    def _run(self, name: str, plan: Plan, *inputs: Tensor) -> Tensor | None:
        batch, stack = plan.batch, self._stacks[name]
        count = batch.slots_T.shape[0]
        if batch.num_extends or count > self.most_tokens:
            return None
        key = name, count > 1
        if key not in self._pieces:
            self._pieces[key] = [self._write(stack)] if name == "write" else self._new(stack)
        begin, *others = self._pieces[key]
        # Without the optimiser of graphs, which takes long and finds nothing here.
        with optimized_execution(False):
            x_TD, angles_TR, *q = begin(batch.positions_T, batch.slots_T, *inputs)
            if not others:
                return x_TD
            step = Step(plan, self._backend, self._rows(batch.slots_T, angles_TR))
            for layer, go_on in zip(stack.layers, others, strict=True):
                heads_THV = step.attend(layer.attention.layer, _query(q))
                x_TD, *q = go_on(x_TD, heads_THV, batch.slots_T, angles_TR)
        return x_TD

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
            q = following.queries(x_TD, layer.finish(x_TD, heads_THV), rows)
            return x_TD, *_tensors(q)

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

    def _write(self, stack: Stack) -> Piece:
        """Only the cache rows of the first layer."""
        [layer] = stack.layers

        def write(positions_T: Tensor, slots_T: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            angles_TR = self._angles_PR.index_select(0, positions_T)
            x_TD = stack.enter(*inputs)
            rows = self._rows(slots_T, angles_TR)
            layer.attention.write(rows, layer.attention_norm(x_TD))
            return x_TD, angles_TR

        return Recorder(write, self._planes(layer))

    def _planes(self, layer: DecoderLayer) -> list[Tensor]:
        """What a layer's rows are written to."""
        index_k = self._storage.index_k[layer.attention.index]
        return [self._storage.latent_LSC, *([] if index_k is None else [index_k])]


def _most_tokens(model: DeepseekModel) -> int:
    """Tokens up to which a layer's operations are the same whatever the tokens are.

    torch records nothing from Python 3.14 on.
    """
    is_plain = model.device.type == "cpu" and model.dtype == torch.float32
    if not is_plain or sys.version_info >= (3, 14):
        return 0
    config, moe = model.config, model.config.moe
    layers = [*model.layers, *([model.mtp.layer] if model.mtp else [])]
    parts = [layer.feed_forward for layer in layers]
    # `by_rows` cuts what is wider: a recording would hold where.
    widths = [config.intermediate_size, config.num_heads * config.rope_dim]
    if config.indexer is not None:
        widths.append(config.indexer.num_heads * config.rope_dim)
    if moe is not None:
        widths += [moe.num_experts, (moe.num_chosen + moe.num_shared) * moe.intermediate_size]
    gathered = [part.most_gathered for part in parts if isinstance(part, Moe)]
    return min(SMALL_STEP, (SHARED_FROM - 1) // max(widths), *gathered)


class Recorder:
    """A function that is recorded by its first call, for inputs of its kind.

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
        beside = self._beside + packed.weights
        names = [f"x{i}" for i in range(len(inputs) + len(beside))]
        function, count = self._function, len(inputs)
        with warnings.catch_warnings():
            # One says that a number of tokens becomes a constant.
            warnings.simplefilter("ignore")
            # `torch.jit.trace` keeps a function, and the weights it reads, as long as the process.
            graph = torch._C._create_graph_by_tracing(
                lambda *given: function(*given[:count]), (*inputs, *beside), lambda _: "",
                True, False, None, names,
            )[0]  # fmt: skip
        recorded: Any = torch._C._create_function_from_graph("piece", graph)
        self._beside = beside
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
