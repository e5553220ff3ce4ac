"""The multi-token-prediction layer: guesses the token after the next (DeepSeek-V3, section 2.2).

z = eh_proj([enorm(embedding of token i + 1), hnorm(hidden i)]), one whole decoder layer over z, and
a norm in front of the model's own head. The layer keeps its own rows in the cache, and its own
index keys: those of another layer would select other tokens than it attends to.
"""

import torch
from torch import Tensor

from ..config import ModelConfig
from .decoder import DecoderLayer
from .linear import Allocator
from .mla import Rows, Step
from .norm import RmsNorm


class MtpLayer:
    """Stored in a checkpoint as layer `num_hidden_layers`."""

    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        hidden = config.hidden_size
        self.token_norm = RmsNorm(hidden, config.rms_norm_eps, allocate)
        self.hidden_norm = RmsNorm(hidden, config.rms_norm_eps, allocate)
        self.join = allocate.linear(hidden, 2 * hidden)
        self.layer = DecoderLayer(config, config.num_layers, config.moe is None, allocate)
        self.norm = RmsNorm(hidden, config.rms_norm_eps, allocate)

    def __call__(self, embedded_TD: Tensor, hidden_TD: Tensor, step: Step) -> Tensor:
        """Hidden states [T, D], ready for the head and for the next guess.

        embedded_TD: the token after each row. hidden_TD: the row's hidden state after the model's
        final norm, or this layer's own result where the row was guessed itself.
        """
        x_TD = self.joined(embedded_TD, hidden_TD)
        return self.norm.add(x_TD, self.layer(x_TD, None, step))

    def write(self, embedded_TD: Tensor, hidden_TD: Tensor, rows: Rows) -> None:
        """Only the layer's rows in the cache; arguments as for a call."""
        x_TD = self.joined(embedded_TD, hidden_TD)
        self.layer.attention.write(rows, self.layer.attention_norm(x_TD))

    def joined(self, embedded_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """The decoder layer's input [T, D]; arguments as for a call."""
        normed = self.token_norm(embedded_TD), self.hidden_norm(hidden_TD)
        return self.join(torch.cat(normed, dim=-1))
