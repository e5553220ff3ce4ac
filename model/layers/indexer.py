"""The lightning indexer's projections: index keys for the cache, index queries for the selection.

score(t) = sum_n w_n * relu(q_n . k_t) * n^-0.5 * D^-0.5, with q from the normed query latent, k and
w from the layer's input (DeepSeek-V3.2-Exp, section 2.1). Scoring and selecting are the attention
backend's work. Rope covers the first R dimensions of q and k.
"""

import torch.nn.functional as F
from torch import Tensor

from ...attention.base import IndexQuery
from ..config import IndexerConfig
from .linear import Allocator
from .norm import LayerNorm
from .rope import rotate_


class Indexer:
    """wq_b, the key norm and the head weights; wk is a part of MLA's first projection."""

    def __init__(
        self,
        indexer: IndexerConfig,
        query_latent: int,
        hidden: int,
        rope_dim: int,
        allocate: Allocator,
    ) -> None:
        self.indexer = indexer
        self.rope_dim = rope_dim
        self.up = allocate.linear(indexer.num_heads * indexer.head_dim, query_latent)
        self.key_norm = LayerNorm(indexer.head_dim, allocate)
        self.weights_nD = allocate.fp32(indexer.num_heads, hidden)
        self.scale = (indexer.num_heads * indexer.head_dim) ** -0.5

    def keys(self, projected_TD: Tensor, angles_TR: Tensor) -> Tensor:
        """Finished index keys [T, D] of projected ones."""
        keys_TD = self.key_norm(projected_TD)
        rotate_(keys_TD.narrow(1, 0, self.rope_dim), angles_TR)
        return keys_TD

    def weights(self, x_TD: Tensor) -> Tensor:
        """Head weights [T, n] from the layer's input, in fp32 and not yet scaled."""
        return F.linear(x_TD.float(), self.weights_nD)

    def heads(self, projected_TE: Tensor) -> Tensor:
        """Index queries [T, n, D] as `up` projected them, not yet rotated."""
        return projected_TE.view(-1, self.indexer.num_heads, self.indexer.head_dim)

    def queries(self, projected_TE: Tensor, weights_Tn: Tensor, angles_TR: Tensor) -> IndexQuery:
        """Finished index queries of projected ones, with the scaled head weights."""
        q_TnD = self.heads(projected_TE)
        rotate_(q_TnD.narrow(2, 0, self.rope_dim), angles_TR.unsqueeze(1))
        return IndexQuery(q_TnD, weights_Tn)
