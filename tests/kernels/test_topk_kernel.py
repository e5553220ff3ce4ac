"""The GPU's top-k against its definition: order, ties, NaN, infinities, cuts, slots.

Every short row is chosen from as a whole and as a long one is: by parts.
"""

from dataclasses import replace

import pytest
import torch

from minidsa.attention.kernels import topk
from minidsa.attention.kernels.reference import slots_of_positions
from minidsa.attention.kernels.topk_parts import Sharing, choose, collect, select_by_parts
from minidsa.attention.kernels.topk_triton import PagedSlots, select_top_k, takes_assembly

INF, NAN = float("inf"), float("nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILED = takes_assembly(DEVICE)
SMALL = Sharing(parts=4, block=512, sample=512, places=4096, choosing_warps=8)


def check(scores: torch.Tensor, visible: list[int], k: int) -> None:
    """Equal to the definition, with what is hidden and the output poisoned."""
    scores = scores.to(DEVICE, torch.float32)
    length = scores.shape[1]
    visible_T = torch.tensor(visible, dtype=torch.int32, device=DEVICE)
    columns = torch.arange(length, device=DEVICE)
    poison = torch.where(columns % 2 == 0, NAN, INF)
    scores = torch.where(columns < visible_T.unsqueeze(1), scores, poison)
    out = torch.full((len(scores), k), 12345, dtype=torch.int32, device=DEVICE)
    assert select_top_k(scores, visible_T, k, out=out) is out
    # On the CPU: torch's own top-k of a GPU reads what it has not written (initcheck says).
    expected = topk.top_k(scores.cpu(), visible_T.cpu().long().clamp(0, length), k)[0]
    assert torch.equal(out.cpu().long(), expected)
    if length <= 5000:
        select_by_parts(scores, visible_T, out.fill_(-7), None, COMPILED, SMALL)
        assert torch.equal(out.cpu().long(), expected)


def random_scores(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 64, 511, 2048])
@pytest.mark.parametrize("length", [1, 129, 2500])
def test_random_scores(length, k):
    visible = [length, 0, 1, length - 1, min(k, length), min(k + 1, length), -3, length + 9]
    check(random_scores(8, length), visible, k)


def test_ties_at_the_threshold_go_to_the_lowest_positions():
    zeros = random_scores(4, 5000).relu()
    zeros[1] = -0.0 * random_scores(1, 5000)[0].sign()
    zeros[2, ::3] = 7.0
    check(zeros, [5000, 5000, 4999, 2600], 1024)


@pytest.mark.parametrize("grain", [20, 200, 5000])
def test_from_one_to_many_equals_at_the_threshold(grain):
    scores = (random_scores(3, 3000) * grain).round() / grain
    for k in (64, 1500):
        check(scores, [3000, 2999, 1600], k)


@pytest.mark.parametrize("value", [0.0, -0.0, 3.5, -1e-45, INF, -INF, NAN])
def test_rows_of_one_value(value):
    check(torch.full((2, 2500), value), [2500, 2049], 2048)


def test_neighbouring_numbers_are_told_apart():
    """Two keys that differ in the last bit only, at the threshold."""
    low, high = 1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    scores = torch.full((2, 600), low)
    scores[:, 1::2] = high
    for k in (299, 300, 301):
        check(scores, [600, 599], k)
        check(-scores, [600, 599], k)


def test_infinities_nan_and_denormals():
    values = [NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, NAN, 3e38, -3e38, 1.0]
    scores = torch.tensor(values * 40)[None]
    for k in (1, 41, 80, 200, 360, 400, 439):
        check(scores, [440], k)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 40.0])
def test_any_distribution_ends(spread):
    """Values over many orders of magnitude, of both signs, with one far away."""
    scores = torch.exp(spread * random_scores(3, 3000)) * random_scores(3, 3000, 1).sign()
    scores[1, 77] = 3e38
    check(scores, [3000, 3000, 2999], 512)


@pytest.mark.parametrize("k", [64, 2047])
def test_long_rows_are_cut_without_a_trace(k):
    """Random, one full of zeros, one that ends in the first part."""
    scores = random_scores(3, 40_001)
    scores[1] = scores[1].relu() + scores[1].clamp(max=-1.0)
    check(scores, [40_001, 32_800, 100], k)


@pytest.mark.deep
@pytest.mark.parametrize("length", [131_072, 280_001])
def test_very_long_rows(length):
    scores = random_scores(2, length)
    scores[1, 100_000:120_000] = 3.0
    check(scores, [length, length - 1], 2048)


def by_candidates(scores: torch.Tensor, visible: list[int], k: int, how: Sharing) -> bool:
    """Whether the candidates alone say which k are best: the rows are lost before the choice."""
    visible_T = torch.tensor(visible, dtype=torch.int32, device=DEVICE)
    scores = scores.to(DEVICE).clone()
    expected = topk.top_k(scores, visible_T.long(), k)[0]
    candidates = collect(scores, visible_T, k, how, COMPILED)
    out = torch.empty(len(scores), k, dtype=torch.int32, device=DEVICE)
    choose(scores.fill_(NAN), visible_T, candidates, out, None, how, COMPILED)
    return torch.equal(out.long(), expected)


@pytest.mark.parametrize("k", [1, 300, 2048])
def test_candidates_are_enough(k):
    """Also with the best in one part, and with a few equals at the threshold."""
    scores = random_scores(4, 5000)
    scores[1] = (scores[1] * 2000).round() / 2000
    scores[2, 1280:2560] += 4.0
    scores[3, ::7] = -INF
    assert by_candidates(scores, [5000, 4999, 5000, 3000], k, SMALL)


def test_candidates_that_do_not_fit_are_not_believed():
    """More than there are places for: the row is read once more, and is no longer what it was."""
    scores, few = random_scores(1, 5000), replace(SMALL, places=1024)
    assert by_candidates(scores, [5000], 300, few)
    assert not by_candidates(scores, [5000], 1000, few)
    out = torch.empty(1, 1000, dtype=torch.int32, device=DEVICE)
    visible_T = torch.tensor([5000], dtype=torch.int32, device=DEVICE)
    select_by_parts(scores.to(DEVICE), visible_T, out, None, COMPILED, few)
    assert torch.equal(out.long().cpu(), topk.top_k(scores, torch.tensor([5000]), 1000)[0])


@pytest.mark.parametrize(("rows", "parts"), [(1, 64), (8, 16), (128, 4), (4096, 1), (10_000, 1)])
def test_the_more_rows_the_fewer_parts(rows, parts):
    assert Sharing.of(rows, 131_072).parts == parts


def test_slots_by_page():
    page, k = 4, 40
    scores = random_scores(5, 90)
    visible = [90, 17, 0, 33, 61]
    request = [0, 0, 1, 2, 2]
    table = torch.randperm(75, generator=torch.Generator().manual_seed(1)).view(3, 25)
    visible_T = torch.tensor(visible, dtype=torch.int32, device=DEVICE)
    request_T = torch.tensor(request, dtype=torch.int32, device=DEVICE)
    slots = PagedSlots(table.to(DEVICE, torch.int32), request_T, page)
    out = select_top_k(scores.to(DEVICE), visible_T, k, slots=slots)
    positions, _ = topk.top_k(scores, torch.tensor(visible), k)
    expected = slots_of_positions(positions, table[request], page)
    assert torch.equal(out.long().cpu(), expected)
    select_by_parts(scores.to(DEVICE), visible_T, out.fill_(-7), slots, COMPILED, SMALL)
    assert torch.equal(out.long().cpu(), expected)


def test_rows_of_a_wider_matrix():
    wide = random_scores(4, 400).to(DEVICE)
    visible_T = torch.tensor([300, 299, 0, 7], dtype=torch.int32, device=DEVICE)
    narrow = wide[:, 3:304]
    expected = topk.top_k(narrow.contiguous(), visible_T.long(), 32)[0]
    assert torch.equal(select_top_k(narrow, visible_T, 32).long(), expected)


def test_what_it_cannot_do_is_refused():
    scores, visible = torch.zeros(1, 8), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="1 to 2048, got 2049"):
        select_top_k(scores, visible, 2049)
    with pytest.raises(TypeError, match=r"got torch\.float16"):
        select_top_k(scores.half(), visible, 4)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        select_top_k(scores, visible.long(), 4)
    with pytest.raises(ValueError, match="contiguous"):
        select_top_k(scores.T.expand(8, 4), torch.ones(8, dtype=torch.int32), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 1024, 2048, 1999])
@pytest.mark.parametrize(
    "shape",
    [
        *[(128, 32768), (300, 31999), (1, 131072), (8, 131072), (128, 131071), (600, 50_000)],
        *[(1200, 33_000), (1, 1 << 20), (3, 1 << 20)],
    ],
)
def test_large_shapes(shape, k):
    rows, length = shape
    scores = torch.randn(rows, length, device=DEVICE)
    scores[rows // 2].relu_()
    scores[-1, ::2] = 0.25
    visible = torch.randint(0, length + 1, (rows,)).tolist()
    visible[0] = length
    check(scores, visible, k)


@pytest.mark.gpu
def test_lengths_from_1_to_160k():
    lengths = [1, 63, 2047, 2048, 2049, 2176, 4096, 32_768, 32_769, 65_537, 159_999, 160_000]
    check(torch.randn(len(lengths), 160_000, device=DEVICE), lengths, 2048)


@pytest.mark.gpu
def test_rows_behind_two_billion_elements():
    length = 32768
    rows = 2**31 // length + 3
    scores = torch.zeros(rows, length, device=DEVICE)
    scores[-1].normal_()
    visible_T = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    out = select_top_k(scores, visible_T, 2048)
    expected = topk.top_k(scores[-2:], visible_T[-2:].long(), 2048)[0]
    assert torch.equal(out[-2:].long(), expected)


@pytest.mark.gpu
def test_replays_of_a_graph_follow_new_lengths():
    scores = torch.randn(4, 50_000, device=DEVICE)
    visible_T = torch.full((4,), 50_000, dtype=torch.int32, device=DEVICE)
    out = select_top_k(scores, visible_T, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_top_k(scores, visible_T, 512, out=out)
    for lengths in ([1, 0, 50_000, 700], [40_000, -1, 512, 513]):
        visible_T.copy_(torch.tensor(lengths))
        out.fill_(-7)
        graph.replay()
        expected = topk.top_k(scores, visible_T.long().clamp(min=0), 512)[0]
        assert torch.equal(out.long(), expected)
