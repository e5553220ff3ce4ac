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
    """Host numbers on the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, which the host does not wait for.

    A GPU reads it from pinned memory, which torch uses again only when it was read.
    """
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class Arriving:
    """A copy of a tensor on its way to the host, waited for by itself.

    It goes to pinned memory of its own; what the device is given behind it holds up nobody.
    """

    def __init__(self, tensor: Tensor) -> None:
        on_cuda = tensor.is_cuda
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> Tensor:
        """The copy, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
