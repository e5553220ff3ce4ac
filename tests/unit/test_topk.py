"""The exact top-k: one total order, ties, NaN, infinities, crowding, and its fast form."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import attention_oracle as oracle
from minidsa.attention.kernels import topk as topk_module
from minidsa.attention.kernels.topk import check_selection, top_k, top_k_of_many

INF, NAN = float("inf"), float("nan")
SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 1e-45, -1e-45, INF, -INF, NAN, 3e38])


def run(values: list[float], k: int, visible: int | None = None) -> tuple[list[int], int]:
    """Positions of one row whose hidden part is poisoned, and the count."""
    visible = len(values) if visible is None else visible
    scores = torch.tensor([values], dtype=torch.float32)
    positions, counts = top_k(scores, torch.tensor([visible]), k)
    assert positions.dtype == torch.int64 and positions.shape == (1, k)
    return positions[0].tolist(), int(counts[0])


@given(st.lists(SCORES, min_size=1, max_size=40), st.integers(1, 50), st.data())
def test_equals_the_definition(values, k, data):
    visible = data.draw(st.integers(0, len(values)))
    positions, count = run(values, k, visible)
    single = torch.tensor(values).tolist()
    assert count == min(k, visible)
    assert positions == oracle.best(single[:visible], k) + [-1] * (k - count)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 9), st.data())
def test_fast_form_equals_the_definition(rows, k, extra, data):
    """Rows of different lengths, ties and NaN in some of them only."""
    visible = [data.draw(st.integers(0, k + 1 + extra)) for _ in range(rows)]
    length = max(k + 1, *visible, 0)
    values = [data.draw(st.lists(SCORES, min_size=length, max_size=length)) for _ in range(rows)]
    scores = torch.tensor(values)
    visible_T = torch.tensor(visible)
    scores.masked_fill_(torch.arange(length) >= visible_T.unsqueeze(1), -INF)
    expected = top_k(scores, visible_T, k)[0]
    assert torch.equal(top_k_of_many(scores, visible_T, k), expected)


def test_fast_form_settles_ordinary_scores_without_keys(monkeypatch):
    """Random scores have no ties: the long way is not taken."""
    scores = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    visible = torch.full((7,), 300)
    expected = top_k(scores, visible, 64)[0]
    monkeypatch.setattr(topk_module, "top_k", None)
    assert torch.equal(top_k_of_many(scores, visible, 64), expected)


def test_one_row_short_by_nan_and_another_long_by_a_tie():
    """Exactly rows * k scores reach their thresholds, yet neither row has k."""
    scores = torch.tensor([[NAN, 5.0, 4.0, 1.0, 0.0, -1.0], [5.0, 3.0, 3.0, 3.0, 1.0, 0.0]])
    visible = torch.tensor([6, 6])
    assert top_k_of_many(scores, visible, 2).tolist() == [[1, 2], [0, 1]]


def test_hidden_scores_are_never_looked_at():
    scores = torch.tensor([[1.0, 2.0, INF, NAN]])
    positions, counts = top_k(scores, torch.tensor([2]), 3)
    assert positions.tolist() == [[0, 1, -1]] and counts.tolist() == [2]


def test_minus_zero_equals_zero():
    assert run([-0.0, 0.0, -0.0, 0.0], 2)[0] == [0, 1]
    assert run([0.0, -0.0, 1.0], 2)[0] == [0, 2]


def test_nan_is_last_but_counted():
    assert run([NAN, -INF, NAN, -3.0], 3) == ([0, 1, 3], 3)
    assert run([NAN, -INF, 2.0], 2) == ([1, 2], 2)


def winners_and_zeros(winners: int, length: int) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(length)
    places = torch.randperm(length, generator=generator)[:winners].sort().values
    scores = torch.zeros(1, length)
    scores[0, places] = 1.0 + torch.rand(winners, generator=generator)
    return scores, places.tolist()


@pytest.mark.parametrize("form", ["definition", "fast"])
@pytest.mark.parametrize(
    ("winners", "length", "k"), [(100, 8320, 2048), (1, 130, 64), (63, 200, 64), (20, 8193, 512)]
)
def test_num_04_winners_among_zeros(form, winners, length, k):
    scores, places = winners_and_zeros(winners, length)
    visible = torch.tensor([length])
    chosen = (
        top_k(scores, visible, k)[0] if form == "definition" else top_k_of_many(scores, visible, k)
    )
    positions = chosen[0].tolist()
    assert len(set(positions)) == k and min(positions) >= 0 and max(positions) < length
    assert set(places) <= set(positions)
    zeros = [i for i in range(length) if i not in set(places)]
    assert sorted(set(positions) - set(places)) == zeros[: k - winners]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_num_04_one_infinity_equal_rows_and_short_rows(length):
    k = 16
    filled = min(k, length)
    equal = [2.5] * length
    assert run(equal, k) == (list(range(filled)) + [-1] * (k - filled), filled)
    infinite = [0.0] * (length - 1) + [INF]
    positions, count = run(infinite, k)
    assert length - 1 in positions and count == filled
    assert -1 not in positions[:count] and positions[count:] == [-1] * (k - count)


@pytest.mark.parametrize("scale", [1.0, -1.0, 2.0**-100, 2.0**100, -(2.0**-100), 2.0**-140])
def test_num_05_scores_within_one_half_precision_bin(scale):
    steps = torch.arange(4000, dtype=torch.float64) * 2**-23
    scores = ((1.0 + steps) * scale).float()
    scores = scores[torch.randperm(4000, generator=torch.Generator().manual_seed(5))][None]
    visible = torch.tensor([4000])
    expected = scores[0].topk(2048).values.sort().values
    for chosen in (top_k(scores, visible, 2048)[0], top_k_of_many(scores, visible, 2048)):
        assert torch.equal(scores[0, chosen[0]].sort().values, expected)


@pytest.mark.parametrize("length", [17, 64, 257])
def test_num_07_all_scores_equal_selects_the_first_positions(length):
    for value in (0.0, -0.0, 1.5):
        scores, visible = torch.full((3, length), value), torch.full((3,), length)
        for _ in range(20):
            chosen = top_k_of_many(scores, visible, 16)
            assert chosen.tolist() == [list(range(16))] * 3


@pytest.mark.parametrize("neighbours", [0, 1, 5, 63])
def test_choice_does_not_depend_on_the_batch_or_the_place_in_it(neighbours):
    generator = torch.Generator().manual_seed(neighbours)
    row = torch.randint(0, 3, (1, 90), generator=generator).float()
    others = torch.randn(neighbours, 90, generator=generator)
    alone = top_k_of_many(row, torch.tensor([90]), 16)
    for place in {0, neighbours // 2, neighbours}:
        scores = torch.cat((others[:place], row, others[place:]))
        visible = torch.full((neighbours + 1,), 90)
        assert torch.equal(top_k_of_many(scores, visible, 16)[place], alone[0])


def test_no_rows():
    positions, counts = top_k(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 3)
    assert positions.shape == (0, 3) and counts.shape == (0,)


@pytest.mark.parametrize(
    ("row", "visible"),
    [
        ([-1, -1, -1], 5),
        ([0, -1, 2], 5),
        ([0, 1, 5], 5),
        ([0, 0, 1], 5),
        ([2, 1, 0], 5),
        ([0, 1, 2], 2),
        ([0, 1, -1], 5),
    ],
)
def test_check_selection_refuses_what_top_k_cannot_return(row, visible):
    with pytest.raises(RuntimeError, match="row 1 sees"):
        check_selection(torch.tensor([[0, 1, 2], row]), torch.tensor([9, visible]))


def test_check_selection_accepts_what_it_returns():
    for visible in (0, 1, 3, 9):
        positions, _ = top_k(torch.randn(1, 9), torch.tensor([visible]), 3)
        check_selection(positions, torch.tensor([visible]))
