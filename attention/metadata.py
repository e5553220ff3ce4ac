"""The tokens of one step, as attention sees them.

One object serves the dense and the sparse path, target and drafter alike. It lives for one step,
so nothing stale can survive it. Lengths are host integers: every decision that depends on them
(dense or sparse, chunking, workspace sizes) is made without asking the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


def visible_keys(query_lens: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    """Keys that each token sees: context + j + 1, and 0 for a padding request's."""
    visible: list[int] = []
    for query, context in zip(query_lens, context_lens, strict=True):
        visible += range(context + 1, context + query + 1) if context >= 0 else [0] * query
    return visible


@dataclass(frozen=True)
class Part:
    """The extends or the decodes of a step: a read-only view of some requests of the batch.

    The fields are those of `AttentionBatch`, cut to these requests.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_table_BP: Tensor

    def __len__(self) -> int:
        return len(self.query_lens)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Tokens of each request once this step's rows are written."""
        return tuple(q + c for q, c in zip(self.query_lens, self.context_lens, strict=True))

    @cached_property
    def longest(self) -> int:
        return max(self.kv_lens, default=0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the tokens of each request begin among those of the part."""
        return tuple(accumulate(self.query_lens[:-1], initial=0))[: len(self)]

    def visible(self) -> list[int]:
        """Keys that each token sees: context + j + 1, and 0 for a padding request's."""
        return visible_keys(self.query_lens, self.context_lens)


@dataclass(frozen=True)
class AttentionBatch:
    """B requests, extends (prompt chunks) first, decodes after; T tokens in that order.

    Every decode request brings the same number of tokens, `decode_width` (1, or draft tokens + 1).
    Token j of a request sees its context, the tokens before it and itself: context + j + 1 keys.

    query_lens: tokens of each request in this step, each at least 1.
    context_lens: tokens of each request that were cached before this step. A padding request has
        context -query_len: none of its tokens sees any key, and attention gives it zeros.
    positions_T: int64, position of each token in its request.
    slots_T: int64, cache slot (page * page_size + offset) that each token's rows go to.
    block_table_BP: int32, pages of each request in order, padded with page 0.

    Raises ValueError or TypeError, with the numbers, when these do not fit together.
    """

    num_extends: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    positions_T: Tensor
    slots_T: Tensor
    block_table_BP: Tensor

    def __post_init__(self) -> None:
        rows = (len(self.query_lens), len(self.context_lens), len(self.block_table_BP))
        if len(set(rows)) > 1 or self.num_extends > rows[0]:
            raise ValueError(
                f"{rows[0]} query lengths, {rows[1]} context lengths and {rows[2]} rows of the "
                f"block table, of {self.num_extends} extends and the decodes, do not fit together"
            )
        if min(self.query_lens, default=1) < 1:
            raise ValueError(f"a request has at least one token, got {self.query_lens}")
        if len(set(self.query_lens[self.num_extends :])) > 1:
            widths = self.query_lens[self.num_extends :]
            raise ValueError(f"decodes bring the same number of tokens, got {widths}")
        tokens = (sum(self.query_lens), len(self.positions_T), len(self.slots_T))
        if len(set(tokens)) > 1:
            raise ValueError(
                f"{tokens[0]} tokens, {tokens[1]} positions and {tokens[2]} slots do not fit"
            )
        if self.block_table_BP.dtype != torch.int32:
            raise TypeError(f"the block table is int32, got {self.block_table_BP.dtype}")

    @cached_property
    def extends(self) -> Part:
        n = self.num_extends
        return Part(self.query_lens[:n], self.context_lens[:n], self.block_table_BP[:n])

    @cached_property
    def decodes(self) -> Part:
        n = self.num_extends
        return Part(self.query_lens[n:], self.context_lens[n:], self.block_table_BP[n:])

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
        return self.extends.kv_lens + self.decodes.kv_lens

    def require_same_shape(self, other: "AttentionBatch") -> None:
        """Raise ValueError unless a plan for this batch can be refreshed for `other`.

        Only plans of pure decodes can: as many requests of as many tokens, as wide a block table.
        """
        for batch in (self, other):
            if batch.num_extends:
                raise ValueError(f"a plan with {batch.num_extends} extends cannot be refreshed")
        shapes = [(b.query_lens, tuple(b.block_table_BP.shape)) for b in (self, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the plan was made for tokens and block table {shapes[0]}, the batch has "
                f"{shapes[1]}: make a new plan"
            )
