"""Log-probabilities of chosen tokens, their ranks and the likeliest alternatives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..configs.logprobs import TokenLogprobs
from .inputs import Arriving, to_tensor


@dataclass(frozen=True)
class Scores:
    """Scores of one token in each of M rows, on their way to the host.

    tops: by the place of a row, how many alternatives are wanted beside its token (may be 0).
    """

    tops: Mapping[int, int]
    logprobs_M: Arriving
    ranks_M: Arriving
    top_MK: Arriving
    top_ids_MK: Arriving

    @classmethod
    def of(cls, logits_NV: Tensor, ids_N: Tensor, tops: Mapping[int, int]) -> Self:
        """Score the tokens `ids_N` of the rows in `tops` under softmax(logits), waiting for nothing

        logits_NV: fp32 [N, vocabulary], the model's own, before bias, penalties and temperature.
        A token below 0 gets the scores of any.
        """
        rows_M = to_tensor(list(tops), logits_NV.device)
        logprobs_MV = torch.log_softmax(logits_NV[rows_M], dim=-1)
        chosen_M1 = logprobs_MV.gather(1, ids_N[rows_M].clamp(min=0).unsqueeze(1))
        ranks_M = (logprobs_MV > chosen_M1).sum(dim=1) + 1
        top_MK, top_ids_MK = logprobs_MV.topk(min(max(tops.values()), logits_NV.shape[1]), dim=1)
        found = chosen_M1.squeeze(1), ranks_M, top_MK, top_ids_MK
        return cls(tops, *map(Arriving, found))

    def read(self) -> dict[int, TokenLogprobs]:
        """The scores by the places of their rows; waits for them."""
        arriving = self.logprobs_M, self.ranks_M, self.top_ids_MK, self.top_MK
        logprobs, ranks, ids, top = (part.wait().tolist() for part in arriving)
        return {
            place: TokenLogprobs(logprobs[i], ranks[i], ids[i][:num_top], top[i][:num_top])
            for i, (place, num_top) in enumerate(self.tops.items())
        }


def score_tokens(logits_NV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Score one known token a row, with as many alternatives each; see `Scores.of`."""
    ids_N = to_tensor(token_ids, logits_NV.device)
    tops = dict.fromkeys(range(len(token_ids)), num_top)
    return list(Scores.of(logits_NV, ids_N, tops).read().values())
