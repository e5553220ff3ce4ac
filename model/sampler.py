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
from .sequence import SampleInput


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    word = seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019
    return (mix64(word) >> 11) / (1 << 53)


def sample(logits_NV: Tensor, inputs: Sequence[SampleInput]) -> list[int]:
    """The next token of each row; logits_NV is fp32 [N, vocabulary] and stays unchanged."""
    return choose(logits_NV, inputs).tolist()


def choose(logits_NV: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """The same, int64 [N] on the device. The host waits for nothing if all rows are bare."""
    adjusted_NV = _adjust(logits_NV, inputs)
    drawn = [i for i, row in enumerate(inputs) if row.params.temperature > 0]
    if len(drawn) == len(inputs):
        return _draw(adjusted_NV, inputs)
    tokens_N = adjusted_NV.argmax(dim=-1)
    if drawn:
        drawn_N = torch.tensor(drawn).to(logits_NV.device, non_blocking=True)
        tokens_N[drawn_N] = _draw(adjusted_NV[drawn_N], [inputs[i] for i in drawn])
    return tokens_N


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
    values_N = torch.tensor(values, dtype=torch.float64)
    return values_N.to(like_NV.device, non_blocking=True).unsqueeze(1)


def _adjust(logits_NV: Tensor, inputs: Sequence[SampleInput]) -> Tensor:
    """Apply penalties, bias, minimum length, grammar and thinking budget where they are asked."""
    adjusted_NV = logits_NV
    for i, row in enumerate(inputs):
        if row.is_plain:
            continue
        if adjusted_NV is logits_NV:
            adjusted_NV = logits_NV.clone()
        _adjust_row(adjusted_NV[i], row)
    return adjusted_NV


def _adjust_row(logits_V: Tensor, row: SampleInput) -> None:
    p, device, vocab = row.params, logits_V.device, logits_V.shape[0]
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=device)
        seen_logits = logits_V[seen]
        factor = torch.where(seen_logits > 0, 1 / p.repetition_penalty, p.repetition_penalty)
        logits_V[seen] = seen_logits * factor
    if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
        outputs = torch.tensor(row.output_ids, device=device)
        counts_V = torch.bincount(outputs, minlength=vocab)
        logits_V -= p.frequency_penalty * counts_V + p.presence_penalty * (counts_V > 0)
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=device)
        logits_V[ids] += torch.tensor(list(p.logit_bias.values()), device=device)
    if row.constraint is not None:
        # Last, so that no bias revives an id; stop ids before the minimum are its business too.
        logits_V.masked_fill_(~_allowed(row.constraint.mask(), logits_V), float("-inf"))
    elif len(row.output_ids) < p.min_tokens and p.stop_token_ids:
        logits_V[torch.tensor(p.stop_token_ids, device=device)] = float("-inf")
    forced = row.forced_token
    # A grammar lets thoughts end between characters only.
    if forced is not None and (row.constraint is None or logits_V[forced] > float("-inf")):
        logits_V.fill_(float("-inf"))
        logits_V[forced] = 0.0


def _allowed(mask: bytes, like_V: Tensor) -> Tensor:
    """The mask as a bool tensor; ids that it does not reach are not allowed."""
    vocab, device = like_V.shape[0], like_V.device
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(device)
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    allowed_V = torch.zeros(vocab, dtype=torch.bool, device=device)
    flat = bits.flatten()[:vocab].bool()
    allowed_V[: flat.shape[0]] = flat
    return allowed_V
