"""Mixture of experts: a sigmoid gate limited to the best groups, and grouped matrix products.

Token-expert pairs are sorted by expert, so each expert sees its tokens as one block of rows and the
whole layer is two grouped products, however many experts there are. A CPU has products of its own
(`experts.py`), and so have weights that stay in fp8 (`kernels/fp8_experts.py`).

Shared experts are appended to the routed ones as experts that everybody chooses with weight 1: a
shared block of width s * I is the sum of s blocks of width I.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import MoeConfig
from ..fp8 import BLOCK, Fp8Weights
from .elementwise import by_rows
from .experts import PackedExperts
from .linear import Allocator, Linear
from .mlp import silu_product
from .products import packs

if TYPE_CHECKING:
    from ..kernels.fp8_rows import Fp8Rows


class Gate:
    """DeepSeek-V3's `noaux_tc` gate, in fp32. The bias decides who is chosen, never the weights.

    For a CPU.
    """

    def __init__(self, moe: MoeConfig, hidden: int, allocate: Allocator) -> None:
        self.weight_ED = allocate.fp32(moe.num_experts, hidden)
        self.bias_E = allocate.fp32(moe.num_experts)
        self.moe = moe
        self._packed: Linear | None = None

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (fp32) and ids of the chosen experts, each [T, K], best first."""
        moe, scores_TE = self.moe, self._logits(x_TD)
        by_rows(torch.sigmoid_, scores_TE)
        ranking_TE = scores_TE + self.bias_E
        if moe.num_chosen_groups < moe.num_groups:
            self._best_groups_only_(ranking_TE)
        ids_TK = _descending(ranking_TE).narrow(1, 0, moe.num_chosen)
        weights_TK = scores_TE.gather(1, ids_TK)
        if moe.normalise:
            weights_TK.div_(weights_TK.sum(dim=-1, keepdim=True).add_(1e-20))
        return weights_TK.mul_(moe.scale), ids_TK

    def _logits(self, x_TD: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x_TD.float(), self.weight_ED)
        return self._packed(x_TD)[:, :-1]

    def pack(self) -> None:
        """Move the weight into a packed product, with a row of zeros behind it: `by_rows`."""
        self._packed = Linear(F.pad(self.weight_ED, (0, 0, 0, 1)))
        self._packed.pack()

    def _best_groups_only_(self, ranking_TE: Tensor) -> None:
        """Put -inf outside the best groups; a group counts by the sum of its two best.

        -inf and not 0: with every biased score below 0, a masked 0 would win.
        """
        moe = self.moe
        grouped_TGE = ranking_TE.unflatten(1, (moe.num_groups, -1))
        order_TG = _descending(grouped_TGE.topk(2).values.sum(dim=-1))
        num_left_out = moe.num_groups - moe.num_chosen_groups
        left_out_TG = order_TG.narrow(1, moe.num_chosen_groups, num_left_out)
        places_TGE = left_out_TG.unsqueeze(-1).expand(-1, -1, grouped_TGE.shape[2])
        grouped_TGE.scatter_(1, places_TGE, -torch.inf)


def _descending(scores: Tensor) -> Tensor:
    """Indices by falling score, NaN first; unlike torch.topk equal scores keep the lower first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


class Moe:
    """X = routed + shared experts. gate_up_XED: gate rows, then up rows; down_XDE."""

    def __init__(self, moe: MoeConfig, hidden: int, allocate: Allocator) -> None:
        self.moe = moe
        self.gate = Gate(moe, hidden, allocate)
        experts = moe.num_experts + moe.num_shared
        middle = moe.intermediate_size
        shapes = ((experts, 2 * middle, hidden), (experts, hidden, middle))
        self.fp8: tuple[Fp8Weights, Fp8Weights] | None = None
        if allocate.keeps_fp8 and middle % BLOCK == hidden % BLOCK == 0:
            gate_up, down = (Fp8Weights.empty(*shape, allocate.device) for shape in shapes)
            self.fp8 = gate_up, down
            self.gate_up_XED, self.down_XDE = gate_up.values_XED, down.values_XED
        else:
            self.gate_up_XED, self.down_XDE = (allocate.experts(*shape) for shape in shapes)
        self._experts_X = torch.arange(experts, device=allocate.device)
        self._ones_S = torch.ones(moe.num_shared, device=allocate.device)
        self._packed: PackedExperts | None = None

    @property
    def takes_fp8(self) -> bool:
        return self.fp8 is not None

    @property
    def most_gathered(self) -> int:
        """Tokens up to which operations depend on nothing but their number."""
        pairs = 0 if self._packed is None else self._packed.most_gathered
        return pairs // (self.moe.num_chosen + self.moe.num_shared)

    def __call__(self, x_TD: Tensor, rows: "Fp8Rows | None" = None) -> Tensor:
        """rows: x in fp8, where experts take it so and it was made already."""
        weights_TK, ids_TK = self._choose(x_TD)
        if self.fp8 is not None:
            from ..kernels.fp8_experts import fp8_experts  # noqa: PLC0415 - where triton is installed

            return fp8_experts(x_TD, ids_TK, weights_TK, *self.fp8, rows=rows)
        if x_TD.is_cuda:
            from ..kernels.plain_experts import plain_experts  # noqa: PLC0415 - as above

            return plain_experts(x_TD, ids_TK, weights_TK, self.gate_up_XED, self.down_XDE)
        experts = self._packed or self._grouped
        return self._combine(experts(x_TD, ids_TK), weights_TK).to(x_TD.dtype)

    def _choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the experts of each token, the shared ones behind the others."""
        if x_TD.is_cuda:
            from ..kernels.gate import choose_experts, fp32_product  # noqa: PLC0415 - as above

            gate = self.gate
            return choose_experts(fp32_product(x_TD, gate.weight_ED), gate.bias_E, self.moe)
        weights_TK, ids_TK = self.gate(x_TD)
        tokens, shared = x_TD.shape[0], self.moe.num_shared
        shared_S = self._experts_X.narrow(0, self.moe.num_experts, shared)
        ids_TK = torch.cat((ids_TK, shared_S.expand(tokens, -1)), dim=1)
        return torch.cat((weights_TK, self._ones_S.expand(tokens, -1)), dim=1), ids_TK

    def _grouped(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        """The output of every chosen expert, [T, K, D]."""
        chosen = ids_TK.shape[1]
        sorted_P, order_P = torch.sort(ids_TK.flatten(), stable=True)
        ends_X = torch.searchsorted(sorted_P, self._experts_X, right=True, out_int32=True)
        rows_PD = x_TD.index_select(0, order_P // chosen)
        middle_PE = F.grouped_mm(rows_PD, self.gate_up_XED.transpose(1, 2), offs=ends_X)
        out_PD = F.grouped_mm(silu_product(middle_PE), self.down_XDE.transpose(1, 2), offs=ends_X)
        # Back in the order of the pairs, so that each token's sum has one fixed order.
        pairs_PD = torch.empty_like(out_PD).index_copy_(0, order_P, out_PD)
        return pairs_PD.view(-1, chosen, x_TD.shape[1])

    def pack(self) -> None:
        """Move the weights into the products of `experts.py`, if they are fp32 on a CPU."""
        if packs(self.down_XDE):
            self.gate.pack()
            self._packed = PackedExperts(self.gate_up_XED, self.down_XDE)
            self.gate_up_XED, self.down_XDE = self.gate_up_XED[:0], self.down_XDE[:0]

    @staticmethod
    def _combine(out_TKD: Tensor, weights_TK: Tensor) -> Tensor:
        return (out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)
