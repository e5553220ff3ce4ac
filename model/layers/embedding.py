"""Token embedding and output head; tied models use one weight for both."""

import torch.nn.functional as F
from torch import Tensor

from .linear import Allocator, Linear


class Embedding:
    """Rows of a [vocabulary, hidden] table."""

    def __init__(self, vocab_size: int, width: int, allocate: Allocator) -> None:
        self.weight_VD = allocate.weight(vocab_size, width)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        return F.embedding(token_ids_T, self.weight_VD)


class Head:
    """Hidden states to logits; `tied` shares the embedding's table."""

    def __init__(
        self, vocab_size: int, width: int, allocate: Allocator, tied: Embedding | None = None
    ) -> None:
        if tied is None:
            self.linear = allocate.linear(vocab_size, width)
        else:
            # Packing copies it: the embedding's own table stays readable row by row.
            self.linear = Linear(tied.weight_VD)
            allocate.linears.append(self.linear)

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, vocabulary]."""
        return self.linear(hidden_ND).float()

    def greedy(self, hidden_ND: Tensor) -> Tensor:
        """int64 [N]: the lowest of the likeliest ids, or -1 where a logit is not finite."""
        logits_NV = self.linear(hidden_ND)
        if logits_NV.is_cuda:
            from ..kernels.greedy import greedy_tokens  # noqa: PLC0415 - where triton is installed

            return greedy_tokens(logits_NV)
        finite_N = logits_NV.float().sum(dim=-1).isfinite()
        return logits_NV.argmax(dim=-1).masked_fill_(~finite_N, -1)
