"""The decoder: embedding, layers, final norm, head.

It keeps no state between steps: rows go to the cache it is handed, in the slots the plan names.
"""

import torch
from torch import Tensor

from ..attention.base import AttentionBackend, Plan
from ..kv_cache.storage import CacheStorage
from .config import ModelConfig
from .layers.embedding import Embedding, Head
from .layers.linear import Allocator
from .layers.mla import Mla, Step
from .layers.mlp import Mlp
from .layers.moe import Moe
from .layers.norm import RmsNorm
from .layers.rope import angle_table


class DecoderLayer:
    """x += attention(norm x); x += feed-forward(norm x)."""

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

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), step)
        return x_TD.add_(self.feed_forward(self.feed_forward_norm(x_TD)))


class DeepseekModel:
    """A DeepSeek-V3 or V3.2 model; weights are uninitialised until the loader has filled them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        allocate = Allocator(dtype, device)
        self._linears = allocate.linears
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = Embedding(config.vocab_size, config.hidden_size, allocate)
        self.layers = [
            DecoderLayer(config, index, dense, allocate)
            for index, dense in enumerate(config.dense_layers)
        ]
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, allocate)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = Head(config.vocab_size, config.hidden_size, allocate, tied)
        self.angles_PR = angle_table(
            config.rope, config.rope_dim, config.max_position_embeddings, device
        )

    def pack(self) -> None:
        """Lay the weights out for the processor; afterwards they cannot be read by name."""
        for linear in self._linears:
            linear.pack()
        for layer in self.layers:
            if isinstance(layer.feed_forward, Moe):
                layer.feed_forward.pack()

    def forward(
        self, token_ids_T: Tensor, plan: Plan, backend: AttentionBackend, storage: CacheStorage
    ) -> Tensor:
        """Hidden states after the final norm, [T, D]; rows of the T tokens are in the cache."""
        angles_TR = self.angles_PR.index_select(0, plan.batch.positions_T)
        step = Step(plan, backend, storage, angles_TR)
        x_TD = self.embedding(token_ids_T)
        for layer in self.layers:
            x_TD = layer(x_TD, step)
        return self.norm(x_TD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, vocabulary] of hidden states that `forward` returned."""
        return self.head(hidden_ND)
