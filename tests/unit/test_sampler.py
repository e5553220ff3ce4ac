"""The sampler: filters, penalties and seeds against their definitions, and draws by statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidsa.configs.sampling import SamplingParams
from minidsa.model.logprobs import score_tokens
from minidsa.model.sampler import sample, uniform
from minidsa.model.sequence import SampleInput

VOCAB = 50


def row(prompt=(1, 2), outputs=(), **fields) -> SampleInput:
    return SampleInput(SamplingParams(max_tokens=8, **{"seed": 0, **fields}), prompt, outputs)


@pytest.fixture
def logits():
    return torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def test_greedy_takes_the_likeliest(logits):
    assert sample(logits, [row(temperature=0.0)] * 8) == logits.argmax(-1).tolist()


def test_greedy_tie_goes_to_the_lowest_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 30]] = 5.0
    assert sample(logits, [row(temperature=0.0)]) == [7]


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}]
)
def test_api_21_narrow_filters_equal_greedy(logits, fields):
    rows = [row(seed=s, **fields) for s in range(8)]
    assert sample(logits, rows) == logits.argmax(-1).tolist()


def test_logits_are_left_as_they_were(logits):
    before = logits.clone()
    sample(logits, [row(frequency_penalty=1.0, outputs=(3,), logit_bias={4: 9.0})] * 8)
    assert torch.equal(logits, before)


def allowed(logits_V, *, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0) -> set[int]:
    """Tokens the filters leave, straight from their definitions."""
    probs = torch.softmax(logits_V.double() / temperature, -1)
    order = sorted(range(VOCAB), key=lambda i: (-probs[i].item(), i))
    order = [i for i in order if probs[i] >= min_p * probs[order[0]]][: top_k or VOCAB]
    total, before, kept = sum(probs[i].item() for i in order), 0.0, set()
    for i in order:
        if before >= top_p * total and kept:
            break
        kept.add(i)
        before += probs[i].item()
    return kept


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 10, "top_p": 0.5, "min_p": 0.05, "temperature": 1.7},
        {"top_k": 1000},
    ],
)
def test_draws_stay_inside_the_filters_and_reach_all_of_them(logits, fields):
    expected = allowed(logits[0], **fields)
    seen = set()
    for start in range(0, 20_000, 2_000):
        rows = [row(seed=s, **fields) for s in range(start, start + 2_000)]
        seen |= set(sample(logits[:1].expand(2_000, -1), rows))
    probs = torch.softmax(logits[0].double() / fields.get("temperature", 1.0), -1)
    likely = {i for i in expected if probs[i] > 1e-3}
    assert likely <= seen <= expected


def test_draws_follow_the_distribution(logits):
    """Chi-square over 50k draws; the seeds are fixed, so this passes or fails for good."""
    draws = 50_000
    tokens: list[int] = []
    for start in range(0, draws, 5_000):
        rows = [row(seed=s, temperature=0.8, top_p=0.9) for s in range(start, start + 5_000)]
        tokens += sample(logits[:1].expand(5_000, -1), rows)
    kept = sorted(allowed(logits[0], temperature=0.8, top_p=0.9))
    probs = torch.softmax(logits[0].double() / 0.8, -1)[kept]
    expected = probs / probs.sum() * draws
    observed = torch.tensor([tokens.count(i) for i in kept]).double()
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    degrees = len(kept) - 1
    # Wilson-Hilferty: the 99.9 % quantile of chi-square.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi2 < limit


def test_num_18_a_draw_depends_on_seed_and_position_only(logits):
    alone = sample(logits[:1], [row(seed=11)])
    for size in range(2, 9):
        rows = [row(seed=11), *(row(seed=100 + i) for i in range(size - 1))]
        assert sample(logits[:size], rows)[0] == alone[0]
    other = [sample(logits[:1], [row(seed=s)])[0] for s in range(40)]
    assert len(set(other)) > 5
    moved = [sample(logits[:1], [row(seed=11, outputs=(1,) * n)])[0] for n in range(40)]
    assert len(set(moved)) > 5


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**40))
def test_http_20_uniform_takes_any_seed(seed, position):
    u = uniform(seed, position)
    assert 0.0 <= u < 1.0
    assert u == uniform(seed, position)


def test_uniform_fills_the_interval_over_seeds_and_positions():
    for values in ([uniform(s, 7) for s in range(10_000)], [uniform(7, p) for p in range(10_000)]):
        bins = [0] * 10
        for u in values:
            bins[int(u * 10)] += 1
        assert max(abs(b - 1000) for b in bins) < 150


def test_penalties_count_outputs_and_repetition_counts_the_prompt_too():
    logits = torch.tensor([[3.0, -1.0, 2.9, 2.8] + [-9.0] * (VOCAB - 4)])
    greedy = {"temperature": 0.0}
    assert sample(logits, [row(prompt=(0,), presence_penalty=2.0, **greedy)]) == [0]
    assert sample(logits, [row(outputs=(0,), presence_penalty=0.5, **greedy)]) == [2]
    once = row(outputs=(0, 2, 2), frequency_penalty=0.15, **greedy)
    assert sample(logits, [once]) == [0]
    assert sample(logits, [row(outputs=(0, 2, 2), frequency_penalty=0.25, **greedy)]) == [3]
    assert sample(logits, [row(prompt=(0, 2), repetition_penalty=1.2, **greedy)]) == [3]
    # A negative logit is pushed down, not up, by the repetition penalty.
    low = torch.full((1, VOCAB), -5.0)
    low[0, 1], low[0, 2] = -1.0, -1.5
    assert sample(low, [row(prompt=(1,), repetition_penalty=2.0, **greedy)]) == [2]


def test_api_18_bias_forces_and_forbids(logits):
    assert sample(logits, [row(logit_bias={9: 100.0}, temperature=0.0)] * 8) == [9] * 8
    best = logits[0].argmax().item()
    assert sample(logits[:1], [row(logit_bias={best: -100.0}, temperature=0.0)]) != [best]


def test_min_tokens_masks_stop_ids_until_reached(logits):
    best = logits[0].argmax().item()
    fields = {"min_tokens": 2, "stop_token_ids": [best], "temperature": 0.0}
    assert sample(logits[:1], [row(outputs=(5,), **fields)]) != [best]
    assert sample(logits[:1], [row(outputs=(5, 6), **fields)]) == [best]


def test_a_thinking_budget_forces_the_end_of_thoughts_once(logits):
    def chosen(outputs: tuple[int, ...], **fields) -> int:
        fields = {"thinking_budget": 3, "end_think_id": 17, "temperature": 0.0} | fields
        return sample(logits[:1], [row(outputs=outputs, **fields)])[0]

    free = logits[0].argmax().item()
    assert free != 17
    assert chosen((4, 5)) == free
    assert chosen((4, 5, 6)) == chosen((4, 5, 6, 7)) == 17
    assert chosen((4, 5, 6), temperature=1.0, logit_bias={17: -100.0}) == 17
    assert chosen((4, 17, 6, 7)) == chosen((4, 5, 6, 17, 8, 9)) == free


def test_adjusted_rows_leave_their_mates_alone(logits):
    plain = sample(logits, [row(temperature=0.0)] * 8)
    rows = [row(temperature=0.0) for _ in range(8)]
    rows[3] = row(temperature=0.0, logit_bias={1: 100.0})
    mixed = sample(logits, rows)
    assert mixed[3] == 1
    assert mixed[:3] + mixed[4:] == plain[:3] + plain[4:]


def test_scores_are_those_of_the_distribution(logits):
    tokens = [4, 9, 0, 1, 2, 3, 4, 5]
    scores = score_tokens(logits, tokens, 3)
    reference = torch.log_softmax(logits.double(), -1)
    for i, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        assert score.logprob == pytest.approx(reference[i, token].item(), abs=1e-5)
        assert score.rank == 1 + (reference[i] > reference[i, token]).sum().item()
        assert score.top_ids == reference[i].topk(3).indices.tolist()
        assert score.top_logprobs == pytest.approx(reference[i].topk(3).values.tolist(), abs=1e-5)
    assert score_tokens(logits, tokens, 0)[0].top_ids == []
