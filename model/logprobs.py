"""Log-probabilities of chosen tokens, their ranks and the likeliest alternatives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..configs.logprobs import TokenLogprobs


def score_tokens(logits_NV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Score one token a row under softmax(logits); `num_top` alternatives each (may be 0).

    logits_NV: fp32 [N, vocabulary], the model's own, before bias, penalties and temperature.
    """
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    chosen_N1 = torch.tensor(token_ids, device=logits_NV.device).unsqueeze(1)
    chosen_logprobs_N1 = logprobs_NV.gather(1, chosen_N1)
    ranks = ((logprobs_NV > chosen_logprobs_N1).sum(dim=1) + 1).tolist()
    top_NK, top_ids_NK = logprobs_NV.topk(min(num_top, logits_NV.shape[1]), dim=1)
    return [
        TokenLogprobs(logprob, rank, ids, tops)
        for logprob, rank, ids, tops in zip(
            chosen_logprobs_N1.squeeze(1).tolist(),
            ranks,
            top_ids_NK.tolist(),
            top_NK.tolist(),
            strict=True,
        )
    ]
