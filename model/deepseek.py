"""The model: embedding, decoder layers, final norm, head, and the layer that guesses ahead.

It keeps no state between steps: rows go to the cache it is handed, in the slots the plan names.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..attention.base import AttentionBackend, Plan
from ..kv_cache.storage import CacheStorage
from .config import ModelConfig
from .layers.decoder import DecoderLayer
from .layers.embedding import Embedding, Head
from .layers.linear import Allocator
from .layers.mla import Rows, Step
from .layers.moe import Moe
from .layers.mtp import MtpLayer
from .layers.norm import RmsNorm
from .layers.rope import angle_table


class DeepseekModel:
    """A DeepSeek-V3 or V3.2 model; weights are uninitialised until the loader has filled them.

    `mtp` is None unless the model was made to guess ahead. keeps_fp8: weights that the checkpoint
    stores in fp8 are kept so where a product takes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        with_mtp: bool = False,
        keeps_fp8: bool = False,
    ) -> None:
        allocate = Allocator(dtype, device, keeps_fp8)
        self._linears = allocate.linears
        self.keeps_fp8 = keeps_fp8
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
        self.mtp = MtpLayer(config, allocate) if with_mtp else None
        self.angles_PR = angle_table(
            config.rope, config.rope_dim, config.max_position_embeddings, device
        )

    def pack(self, alive: Callable[[], None] = lambda: None) -> None:
        """Lay the weights out for the processor; afterwards they cannot be read by name.

        alive: called after each product.
        """
        for layer in [*self.layers, *([self.mtp.layer] if self.mtp else [])]:
            layer.attention.pack()
            if isinstance(layer.feed_forward, Moe):
                layer.feed_forward.pack()
                alive()
        for linear in self._linears:
            linear.pack()
            alive()

    def forward(
        self, token_ids_T: Tensor, plan: Plan, backend: AttentionBackend, storage: CacheStorage
    ) -> Tensor:
        """Hidden states after the final norm, [T, D]; rows of the T tokens are in the cache."""
        step = self._step(plan, backend, storage)
        x_TD, delta_TD = self.embedding(token_ids_T), None
        for layer in self.layers:
            delta_TD = layer(x_TD, delta_TD, step)
        return self.norm.add(x_TD, delta_TD)

    def guess(
        self,
        next_ids_T: Tensor,
        hidden_TD: Tensor,
        plan: Plan,
        backend: AttentionBackend,
        storage: CacheStorage,
    ) -> Tensor:
        """Hidden states [T, D] that stand one token further than `hidden_TD` does.

        next_ids_T: the token that follows each row. hidden_TD: from `forward` or from here. Raises
        ValueError for a model that was made without its MTP layer.
        """
        step = self._step(plan, backend, storage)
        return self.mtp_layer(self.embedding(next_ids_T), hidden_TD, step)

    def write_guess_rows(
        self,
        next_ids_T: Tensor,
        hidden_TD: Tensor,
        plan: Plan,
        backend: AttentionBackend,
        storage: CacheStorage,
    ) -> None:
        """Write the rows that `guess` would, without its results."""
        step = self._step(plan, backend, storage)
        self.mtp_layer.write(self.embedding(next_ids_T), hidden_TD, step.rows)

    @property
    def mtp_layer(self) -> MtpLayer:
        """The MTP layer; raises ValueError for a model that was made without it."""
        if self.mtp is None:
            raise ValueError("the model was made without its MTP layer")
        return self.mtp

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, vocabulary] of hidden states that `forward` or `guess` returned."""
        return self.head(hidden_ND)

    def greedy(self, hidden_ND: Tensor) -> Tensor:
        """int64 [N]: the lowest of the likeliest ids, or -1 where a logit is not finite."""
        return self.head.greedy(hidden_ND)

    def _step(self, plan: Plan, backend: AttentionBackend, storage: CacheStorage) -> Step:
        angles_TR = self.angles_PR.index_select(0, plan.batch.positions_T)
        rows = Rows(storage, plan.batch.slots_T, angles_TR, plan.selects)
        return Step(plan, backend, rows)
