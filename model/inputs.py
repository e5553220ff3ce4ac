"""From the scheduler's lists to the tensors of a step."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention.metadata import AttentionBatch


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
    width = max(-(-span.stop // page_size) for span in spans)
    tables = [[*span.pages[:width], *[0] * (width - len(span.pages))] for span in spans]
    lens, contexts = [span.num_tokens for span in spans], [span.context_len for span in spans]
    # A prompt has thousands of tokens: nothing is done token by token.
    ahead = np.array(contexts) - np.array([0, *accumulate(lens[:-1])])
    positions_T, table_BP = np.arange(sum(lens)) + ahead.repeat(lens), np.array(tables, np.int32)
    pages_T = table_BP[np.arange(len(spans)).repeat(lens), positions_T // page_size]
    arrays = positions_T, pages_T.astype(np.int64) * page_size + positions_T % page_size, table_BP
    positions, slots, table = (
        torch.from_numpy(array).to(device, non_blocking=True) for array in arrays
    )
    return AttentionBatch(
        num_extends=num_extends,
        query_lens=tuple(lens),
        context_lens=tuple(contexts),
        positions_T=positions,
        slots_T=slots,
        block_table_BP=table,
    )


def to_tensor(values: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host integers on the device."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
