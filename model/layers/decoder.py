"""One decoder layer: attention and a feed-forward part, each behind a norm."""

from torch import Tensor

from ...attention.base import Query
from ..config import ModelConfig
from .linear import Allocator
from .mla import Mla, Rows, Step
from .mlp import Mlp
from .moe import Moe
from .norm import RmsNorm


class DecoderLayer:
    """x += attention(norm x); x += feed-forward(norm x).

    What a layer adds last is left to the next norm, which has the numbers in hand anyway.
    """

    def __init__(self, config: ModelConfig, index: int, dense: bool, allocate: Allocator) -> None:
        hidden = config.hidden_size
        self.attention_norm = RmsNorm(hidden, config.rms_norm_eps, allocate)
        self.attention = Mla(config, index, allocate)
        self.feed_forward_norm = RmsNorm(hidden, config.rms_norm_eps, allocate)
        self.feed_forward = (
            Mlp(hidden, config.intermediate_size, allocate)
            if dense or config.moe is None
            else Moe(config.moe, hidden, allocate)
        )

    def __call__(self, x_TD: Tensor, delta_TD: Tensor | None, step: Step) -> Tensor:
        """What is still to be added to x_TD, which takes delta_TD and the attention in place."""
        q = self.queries(x_TD, delta_TD, step.rows)
        return self.finish(x_TD, step.attend(self.attention.layer, q))

    def queries(self, x_TD: Tensor, delta_TD: Tensor | None, rows: Rows) -> Query:
        """The first half: what the tokens ask; x_TD takes delta_TD, rows go to the cache."""
        if self.attention.takes_fp8:
            return self.attention.queries(rows, *self.attention_norm.in_fp8(x_TD, delta_TD))
        return self.attention.queries(rows, self.attention_norm.add(x_TD, delta_TD))

    def finish(self, x_TD: Tensor, heads_THV: Tensor) -> Tensor:
        """The second half, from what the heads found; returns what a call does."""
        attended_TD = self.attention.out(heads_THV.flatten(1))
        if self.feed_forward.takes_fp8:
            return self.feed_forward(*self.feed_forward_norm.in_fp8(x_TD, attended_TD))
        return self.feed_forward(self.feed_forward_norm.add(x_TD, attended_TD))
