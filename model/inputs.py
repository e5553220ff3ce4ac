"""From the scheduler's lists to the tensors of a step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.metadata import AttentionBatch
from ..kv_cache.block_table import token_slots


class Span(NamedTuple):
    """Tokens of one request that are computed together, behind `context_len` cached ones."""

    context_len: int
    num_tokens: int
    pages: Sequence[int]

    @property
    def stop(self) -> int:
        return self.context_len + self.num_tokens


def attention_batch(
    spans: Sequence[Span], num_extends: int, page_size: int, device: torch.device
) -> AttentionBatch:
    """Describe a step of these spans, extends first."""
    positions: list[int] = []
    slots: list[int] = []
    for span in spans:
        positions.extend(range(span.context_len, span.stop))
        slots += token_slots(span.pages, page_size, span.context_len, span.stop)
    width = max(-(-span.stop // page_size) for span in spans)
    tables = [[*span.pages[:width], *[0] * (width - len(span.pages))] for span in spans]
    return AttentionBatch(
        num_extends=num_extends,
        query_lens=tuple(span.num_tokens for span in spans),
        context_lens=tuple(span.context_len for span in spans),
        positions_T=to_tensor(positions, device),
        slots_T=to_tensor(slots, device),
        block_table_BP=to_tensor(tables, device, torch.int32),
    )


def to_tensor(values: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host integers on the device."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
