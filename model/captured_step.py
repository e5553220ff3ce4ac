"""One captured shape of a decode step: the tensors that a step is written into, and its results.

Everything that changes from step to step is written to pinned memory and copied from there without
waiting, to tensors that keep their place. Of a result the host reads token ids alone, if any.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..attention.base import AttentionBackend, Plan
from ..attention.metadata import AttentionBatch
from ..kv_cache.block_table import token_slots
from ..kv_cache.storage import CacheStorage
from .choosing import Choosing, Followed
from .inputs import Span

Run = Callable[[], None]

# The tokens of a step: known ones, or those of the step before, which are on the device.
Tokens = Sequence[int] | Followed

# The layers; the layers and the likeliest token of each row; the same of the layer that guesses;
# nothing but that layer's rows.
Work = Literal["layers", "greedy", "guess", "rows"]


class Shape(NamedTuple):
    """requests and pages are those of the padded step."""

    requests: int
    width: int
    pages: int
    selects: bool
    work: Work

    @property
    def tokens(self) -> int:
        return self.requests * self.width


class Replayed(NamedTuple):
    """Hidden states [T, D], overwritten by the next step of their shape.

    chosen: the likeliest token of each row; None where the work does not end in them.
    """

    hidden_TD: Tensor
    chosen: Choosing | None


@dataclass
class StepInputs:
    """Rows of one tensor (ids, positions, slots, places), the block table, and hidden states.

    places: where ids that are on the device are taken from. hidden_TD: what a guess goes on from.
    pages: of each request, as they were written last: most steps change few of them.
    """

    ids_4T: Tensor
    table_BP: Tensor
    hidden_TD: Tensor | None
    host_4T: Tensor
    host_table_BP: Tensor
    pages: list[list[int]]
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, shape: Shape, hidden_size: int, storage: CacheStorage) -> "StepInputs":
        """Padding alone: nothing but page 0."""
        device = storage.latent_LSC.device
        pinned = device.type == "cuda"
        host_4T = torch.zeros(4, shape.tokens, dtype=torch.int64, pin_memory=pinned)
        host_4T[2] = torch.arange(shape.tokens) % storage.page_size
        table = (shape.requests, shape.pages)
        hidden_TD = None
        if shape.work in ("guess", "rows"):
            size = (shape.tokens, hidden_size)
            hidden_TD = torch.zeros(size, dtype=storage.dtype, device=device)
        return cls(
            host_4T.to(device),
            torch.zeros(table, dtype=torch.int32, device=device),
            hidden_TD,
            host_4T,
            torch.zeros(table, dtype=torch.int32, pin_memory=pinned),
            [[] for _ in range(shape.requests)],
            torch.cuda.Event() if pinned else None,
        )

    def write(self, tokens: Tokens, spans: Sequence[Span], page_size: int) -> None:
        """Move a step into the tensors; rows behind it are padding, which page 0 takes."""
        if self.copied is not None:
            # What was copied from here last has long arrived.
            self.copied.synchronize()
        values, count = self.host_4T.numpy(), sum(span.num_tokens for span in spans)
        if isinstance(tokens, Followed):
            values[3, :count] = tokens.places
        else:
            values[0, :count] = tokens
        values[1, :count] = [i for span in spans for i in range(span.context_len, span.stop)]
        values[2, :count] = [
            slot
            for span in spans
            for slot in token_slots(span.pages, page_size, span.context_len, span.stop)
        ]
        values[:2, count:] = 0
        values[2, count:] = [i % page_size for i in range(values.shape[1] - count)]
        self.ids_4T.copy_(self.host_4T, non_blocking=True)
        if isinstance(tokens, Followed):
            ids_N = self.ids_4T[0, :count]
            torch.index_select(tokens.ids_N, 0, self.ids_4T[3, :count], out=ids_N)
            # What follows no number is never taken, but it must be a token.
            ids_N.clamp_(min=0)
        self._write_table(spans)
        if self.copied is not None:
            self.copied.record()

    def write_hidden(self, hidden_TD: Tensor) -> None:
        """What a guess goes on from, one row a token, zeros behind."""
        if self.hidden_TD is None:
            raise ValueError("only a guess starts from hidden states")
        self.hidden_TD[: len(hidden_TD)].copy_(hidden_TD)
        if len(hidden_TD) < len(self.hidden_TD):
            self.hidden_TD[len(hidden_TD) :].zero_()

    def _write_table(self, spans: Sequence[Span]) -> None:
        table, room, changed = self.host_table_BP.numpy(), self.table_BP.shape[1], False
        for row, written in enumerate(self.pages):
            pages = spans[row].pages if row < len(spans) else []
            if len(pages) > room:
                pages = pages[:room]
            if len(pages) != len(written) or pages != written:
                table[row, : len(pages)] = pages
                table[row, len(pages) :] = 0
                self.pages[row] = list(pages)
                changed = True
        if changed:
            self.table_BP.copy_(self.host_table_BP, non_blocking=True)


@dataclass
class Captured:
    """One shape: inputs, the plan over them, the replay and what it leaves behind.

    chosen_T: ids that a replay ends with; None where it chooses none.
    """

    inputs: StepInputs
    plan: Plan
    replay: Run
    hidden_TD: Tensor
    chosen_T: Tensor | None

    def refresh(self, backend: AttentionBackend, shape: Shape, spans: Sequence[Span]) -> None:
        """Bring the plan up to date with the inputs."""
        padding = (-shape.width,) * (shape.requests - len(spans))
        contexts = (*(span.context_len for span in spans), *padding)
        backend.plan(step_batch(self.inputs, shape, contexts), out=self.plan)

    def run(self, count: int) -> Replayed:
        """Replay, waiting for nothing."""
        self.replay()
        chosen = None if self.chosen_T is None else Choosing.of(self.chosen_T[:count])
        return Replayed(self.hidden_TD[:count], chosen)


def step_batch(inputs: StepInputs, shape: Shape, contexts: tuple[int, ...]) -> AttentionBatch:
    """The padded step, as attention sees it."""
    return AttentionBatch(
        num_extends=0,
        query_lens=(shape.width,) * shape.requests,
        context_lens=contexts,
        positions_T=inputs.ids_4T[1],
        slots_T=inputs.ids_4T[2],
        block_table_BP=inputs.table_BP,
    )
