"""What a verify window draws has the model's own distribution, whatever was drafted."""

import math

import pytest
import torch

from minidsa.configs.sampling import SamplingParams
from minidsa.model.sampler import sample
from minidsa.model.sequence import SampleInput, num_accepted

VOCAB = 12
# Normal quantile of p = 0.001.
QUANTILE = 3.0902


def logits_behind() -> torch.Tensor:
    """Row v: the logits behind token v; the last row: those of the first token."""
    return torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5


def kept_by_definition(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then the top_k likeliest, then the fewest whose mass reaches top_p."""
    probs = torch.softmax(logits_V.double() / params.temperature, 0).tolist()
    falling = sorted(range(VOCAB), key=lambda v: -probs[v])[: params.top_k or VOCAB]
    total, mass, kept = sum(probs[v] for v in falling), 0.0, []
    for v in falling:
        if mass >= params.top_p * total:
            break
        kept.append(v)
        mass += probs[v]
    return torch.tensor([probs[v] / mass if v in kept else 0.0 for v in range(VOCAB)]).double()


def two_tokens(draft: int | None, params: list[SamplingParams]) -> torch.Tensor:
    """The first two tokens of each request, by steps that verify `draft` where there is one."""
    table = logits_behind()
    starts = [SampleInput(p, [1], [], None) for p in params]
    first = sample(table[-1].expand(len(params), -1), starts)
    second = [-1] * len(params)
    if draft is not None:
        rows = sample(table[draft].expand(len(params), -1), [s.after([draft]) for s in starts])
        for i, (sampled, following) in enumerate(zip(first, rows, strict=True)):
            if num_accepted([draft], [sampled, following]):
                second[i] = following
    left = [i for i, token in enumerate(second) if token < 0]
    inputs = [SampleInput(params[i], [1], [first[i]], None) for i in left]
    for i, token in zip(left, sample(table[[first[i] for i in left]], inputs), strict=True):
        second[i] = token
    return torch.tensor([first, second])


@pytest.mark.parametrize("draws", [20_000, pytest.param(50_000, marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
    ],
)
def test_spec_08_spec_14_two_tokens_have_the_exact_joint_distribution(fields, draws):
    params = [SamplingParams(max_tokens=2, seed=seed, **fields) for seed in range(draws)]
    table = logits_behind()
    first_V = kept_by_definition(table[-1], params[0])
    behind_VV = torch.stack([kept_by_definition(table[v], params[0]) for v in range(VOCAB)])
    expected = (first_V.unsqueeze(1) * behind_VV).flatten() * draws
    plain = two_tokens(None, params)
    for draft in (int(first_V.argmax()), int(first_V.argmin())):
        drawn = two_tokens(draft, params)
        assert torch.equal(drawn, plain)
        counts = torch.bincount(drawn[0] * VOCAB + drawn[1], minlength=VOCAB * VOCAB)
        assert not counts[expected == 0].any()
        assert chi_square_is_plausible(counts.double(), expected)


def chi_square_is_plausible(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Not rejected at p = 0.001 (Wilson and Hilferty's cube root); rare cells are pooled."""
    common = expected >= 10
    pooled = torch.stack([counts[~common].sum(), expected[~common].sum()])
    counts, expected = counts[common], expected[common]
    if pooled[1] >= 10:
        counts, expected = torch.cat([counts, pooled[:1]]), torch.cat([expected, pooled[1:]])
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * (len(expected) - 1))
    limit = (len(expected) - 1) * (1 - spread + QUANTILE * math.sqrt(spread)) ** 3
    return statistic < limit


def test_the_check_finds_a_distribution_that_is_a_tenth_off():
    expected = torch.full((20,), 1000).double()
    off = expected * torch.tensor([1.1, 0.9] * 10)
    assert chi_square_is_plausible(expected, expected) and not chi_square_is_plausible(
        off, expected
    )
