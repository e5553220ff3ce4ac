"""The tokens of one step, as attention sees them.

One object serves the dense and the sparse path, target and drafter alike. It lives for one step,
so nothing stale can survive it. Lengths are host integers: every decision that depends on them
(dense or sparse, chunking, workspace sizes) is made without asking the device.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """B requests, extends (prompt chunks) first, decodes after; T tokens in that order.

    Every decode request brings the same number of tokens, `decode_width` (1, or draft tokens + 1).

    query_lens: tokens of each request in this step, each at least 1.
    context_lens: tokens of each request that were cached before this step.
    positions_T: int64, position of each token in its request.
    slots_T: int64, cache slot (page * page_size + offset) that each token's rows go to.
    block_table_BP: int32, pages of each request in order, padded with page 0.
    """

    num_extends: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    positions_T: Tensor
    slots_T: Tensor
    block_table_BP: Tensor

    @cached_property
    def num_extend_tokens(self) -> int:
        return sum(self.query_lens[: self.num_extends])

    @cached_property
    def num_decodes(self) -> int:
        return len(self.query_lens) - self.num_extends

    @cached_property
    def decode_width(self) -> int:
        return self.query_lens[-1] if self.num_decodes else 0

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Tokens of each request once this step's rows are written."""
        return tuple(q + c for q, c in zip(self.query_lens, self.context_lens, strict=True))
