"""Drives a model step by step over a paged cache, the way the runner does, keeping every row."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidsa.attention.base import AttentionBackend
from minidsa.attention.metadata import AttentionBatch
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model.deepseek import DeepseekModel


def new_storage(
    model: DeepseekModel, num_pages: int, page_size: int, *, is_fp8: bool = False
) -> CacheStorage:
    """Cache memory filled with NaN, so that reading a row nobody wrote shows."""
    layout = model.config.cache_layout(with_mtp=model.mtp is not None, is_fp8=is_fp8)
    storage = CacheStorage(layout, num_pages, page_size, model.dtype, model.device)
    for plane in storage.planes():
        # These bits are NaN in every format that a row has a part in.
        plane.fill_(0xFF if is_fp8 else torch.nan)
    return storage


@dataclass
class Stepper:
    """Sequences by name; pages are dealt in random order and never given back."""

    model: DeepseekModel
    backend: AttentionBackend
    storage: CacheStorage
    lengths: dict[str, int] = field(default_factory=dict)
    pages: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(1, self.storage.num_pages))
        random.Random(0).shuffle(self._free)

    def batch(self, parts: Sequence[tuple[str, Sequence[int]]], num_extends: int) -> AttentionBatch:
        """Take pages for the parts and describe the step; extends come first."""
        size = self.storage.page_size
        positions, slots = [], []
        for name, tokens in parts:
            start = self.lengths.setdefault(name, 0)
            pages = self.pages.setdefault(name, [])
            while len(pages) * size < start + len(tokens):
                pages.append(self._free.pop())
            for i in range(start, start + len(tokens)):
                positions.append(i)
                slots.append(pages[i // size] * size + i % size)
        width = max(len(self.pages[name]) for name, _ in parts)
        tables = [self.pages[n] + [0] * (width - len(self.pages[n])) for n, _ in parts]
        return AttentionBatch(
            num_extends=num_extends,
            query_lens=tuple(len(tokens) for _, tokens in parts),
            context_lens=tuple(self.lengths[name] for name, _ in parts),
            positions_T=self._tensor(positions),
            slots_T=self._tensor(slots),
            block_table_BP=self._tensor(tables).int(),
        )

    def _tensor(self, values: Sequence) -> Tensor:
        return torch.tensor(values, device=self.storage.latent_LSC.device)

    @torch.inference_mode()
    def step(self, parts: Sequence[tuple[str, Sequence[int]]], num_extends: int) -> Tensor:
        """Logits of every token of the step, [T, vocab]."""
        plan = self.backend.plan(self.batch(parts, num_extends))
        token_ids = self._tensor([token for _, tokens in parts for token in tokens])
        hidden = self.model.forward(token_ids, plan, self.backend, self.storage)
        for name, tokens in parts:
            self.lengths[name] += len(tokens)
        return self.model.logits(hidden)

    def prefill(self, name: str, tokens: Sequence[int], chunk: int) -> Tensor:
        """Logits of every prompt token, computed in chunks."""
        chunks = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return torch.cat([self.step([(name, part)], 1) for part in chunks])

    def greedy(self, name: str, token: int, count: int) -> tuple[list[int], Tensor]:
        """`count` greedy tokens after `token`, and the logits they were taken from."""
        tokens, rows = [], []
        for _ in range(count):
            rows.append(self.step([(name, [token])], 0))
            token = int(rows[-1][0].argmax())
            tokens.append(token)
        return tokens, torch.cat(rows)
