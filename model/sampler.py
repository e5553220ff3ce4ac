"""Chooses the next token of every row.

A draw is the inverse of the cumulative distribution at one number u(seed, position), so a
request's tokens depend on its own seed and logits alone: batch mates, chunking and recomputation
after preemption cannot move them. The distribution is summed in the order of ids, not of
probabilities, so a rounding error that swaps two nearly equal ones hardly moves a border.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..configs.sampling import SamplingParams, mix64
from .adjusting import adjust
from .inputs import to_tensor
from .sequence import SampleInput


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    word = seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019
    return (mix64(word) >> 11) / (1 << 53)


def sample(logits_NV: Tensor, inputs: Sequence[SampleInput]) -> list[int]:
    """The next token of each row, -1 where one of its logits is not finite.

    logits_NV is fp32 [N, vocabulary] and stays unchanged.
    """
    return choose(logits_NV, inputs).tolist()


def choose(logits_NV: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """The same, int64 [N] on the device; the host waits for nothing."""
    # A sum is finite only if every term is: one small reduction guards every row.
    finite_N = logits_NV.sum(dim=-1).isfinite()
    adjusted_NV = adjust(logits_NV, inputs)
    drawn = [i for i, row in enumerate(inputs) if row.params.temperature > 0]
    if len(drawn) == len(inputs):
        tokens_N = _draw(adjusted_NV, inputs)
    else:
        tokens_N = adjusted_NV.argmax(dim=-1)
        if drawn:
            drawn_N = to_tensor(drawn, logits_NV.device)
            tokens_N[drawn_N] = _draw(adjusted_NV[drawn_N], [inputs[i] for i in drawn])
    return tokens_N.masked_fill_(~finite_N, -1)


def _draw(logits_NV: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """Draw by inverse CDF among the ids that the filters keep; ids without filters need no sorting.

    The sums are fp64, so a vocabulary of any size keeps its tail.
    """
    params = [row.params for row in inputs]
    scaled_NV = logits_NV.double() / _column([p.temperature for p in params], logits_NV)
    probs_NV = torch.softmax(scaled_NV, dim=-1)
    if any(p.top_k or p.min_p or p.top_p < 1 for p in params):
        probs_NV = torch.where(_kept(logits_NV, probs_NV, params), probs_NV, 0.0)
    mass_NV = probs_NV.cumsum(dim=-1)
    draws_N1 = _column([uniform(row.params.seed, row.position) for row in inputs], logits_NV)
    ids_N1 = torch.searchsorted(mass_NV, draws_N1 * mass_NV[:, -1:], right=True)
    # Where the product rounds up to the whole mass: the last id that was kept.
    return ids_N1.minimum(mass_NV.argmax(dim=-1, keepdim=True)).squeeze(1)


def _kept(logits_NV: Tensor, probs_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """bool [N, vocabulary]: a front part of the falling order, all of it where no filter is set.

    min_p and top_k cut first, top_p cuts what is left after renormalising; ties fall to the lower
    id, as in greedy choice.
    """
    vocab = logits_NV.shape[1]
    order_NV = logits_NV.sort(dim=-1, descending=True, stable=True).indices
    sorted_NV = probs_NV.gather(1, order_NV)
    ranks_V = torch.arange(vocab, device=logits_NV.device)
    keep_NV = ranks_V < _column([p.top_k or vocab for p in params], logits_NV)
    keep_NV &= sorted_NV >= _column([p.min_p for p in params], logits_NV) * sorted_NV[:, :1]
    mass_NV = torch.where(keep_NV, sorted_NV, 0.0).cumsum(dim=-1)
    # A token stays while the mass before it is short of top_p: the likeliest always does.
    top_p_N1 = _column([p.top_p for p in params], logits_NV)
    keep_NV &= (mass_NV - sorted_NV < top_p_N1 * mass_NV[:, -1:]) | (top_p_N1 >= 1)
    keep_NV[:, 0] = True
    return torch.empty_like(keep_NV).scatter_(1, order_NV, keep_NV)


def _column(values: Sequence[float], like_NV: Tensor) -> Tensor:
    return to_tensor(values, like_NV.device, torch.float64).unsqueeze(1)
