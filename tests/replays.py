"""Stands for replayed decode steps where nothing can be captured: the same work, done at once.

So the real runner starts steps ahead over any backend. What a replay would overwrite is spoilt.
"""

from collections.abc import Sequence

import torch

from minidsa.attention.base import AttentionBackend
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model.captured_step import Replayed, Tokens
from minidsa.model.choosing import Choosing, Followed
from minidsa.model.decode_graphs import DecodeGraphs
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.inputs import Span, attention_batch, to_tensor
from minidsa.model.recorded_layers import RecordedLayers


class Replays(DecodeGraphs):
    """num_ahead: steps that were started before the tokens in front of them were waited for."""

    def __init__(
        self,
        model: DeepseekModel,
        backend: AttentionBackend,
        storage: CacheStorage,
        recorded: RecordedLayers | None = None,
    ) -> None:
        self.num_ahead = 0
        self._parts = model, backend, storage
        self._recorded = recorded
        self._left: Replayed | None = None

    def forward(self, tokens: Tokens, spans: Sequence[Span], *, greedy: bool = False) -> Replayed:
        model, backend, storage = self._parts
        if isinstance(tokens, Followed):
            self.num_ahead += 1
            ids_T = tokens.ids_N[list(tokens.places)].clamp(min=0)
        else:
            ids_T = to_tensor(tokens, model.device)
        if self._left is not None:
            self._left.hidden_TD.fill_(torch.nan)
            if self._left.chosen is not None:
                self._left.chosen.ids_N.fill_(-1)
        plan = backend.plan(attention_batch(spans, 0, storage.page_size, model.device))
        hidden_TD = None if self._recorded is None else self._recorded.forward(ids_T, plan)
        if hidden_TD is None:
            hidden_TD = model.forward(ids_T, plan, backend, storage)
        chosen = Choosing.of(model.greedy(hidden_TD)) if greedy else None
        self._left = Replayed(hidden_TD, chosen)
        return self._left
