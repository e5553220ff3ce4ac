"""Scores and top-k in a bounded workspace: chunks, and the same choice whatever their size."""

import pytest
import torch
from test_indexer_logits import DEVICE, Bed

from minidsa.attention.kernels import topk
from minidsa.attention.kernels.index_select import plan_selection, select_keys, workspace_floats
from minidsa.attention.kernels.reference import slots_of_positions


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def workspace(floats: int) -> torch.Tensor:
    return torch.full((floats,), float("nan"), device=DEVICE)


def chosen(bed: Bed, contexts: list[int], floats: int, k: int, *, as_slots: bool = False):
    heads = bed.q_TnD.shape[1]
    plan = plan_selection(bed.query_lens, contexts, heads, workspace(floats))
    out_TK = torch.full((len(bed.visible), k), 77, dtype=torch.int32, device=DEVICE)
    inputs = (bed.q_TnD, bed.weights_Tn, bed.pages, bed.table_BP)
    return select_keys(plan, *inputs, out_TK, as_slots=as_slots), len(plan.chunks)


def test_small_workspaces_choose_the_same_keys():
    contexts = [150, 0, 70]
    bed = Bed([18, 3, 1], contexts, heads=32)
    expected, _ = topk.top_k(bed.expected().cpu(), torch.tensor(bed.visible), 48)
    everything, one = chosen(bed, contexts, 22 * 192, 48)
    little, many = chosen(bed, contexts, 8 * 192, 48)
    assert one == 1 and many == 3
    assert torch.equal(everything, little)
    assert torch.equal(everything.long().cpu(), expected)


def test_slots_of_the_right_request():
    contexts = [90, 64, -1]
    bed = Bed([2, 5, 1], contexts, heads=16)
    positions, _ = topk.top_k(bed.expected().cpu(), torch.tensor(bed.visible), 64)
    table = bed.table_BP[bed.request].cpu()
    expected = slots_of_positions(positions, table, bed.page)
    out, _ = chosen(bed, contexts, 5 * 192, 64, as_slots=True)
    assert torch.equal(out.long().cpu(), expected)
    assert (out[-1] == -1).all(), "a padding request chooses nothing"


def test_chunks_are_whole_groups_within_the_workspace():
    room = 16 * 1024
    plan = plan_selection([30, 1, 41], [1000, 63, 0], 64, torch.empty(room))
    tokens = [i for chunk in plan.chunks for i in range(chunk.tokens.start, chunk.tokens.stop)]
    assert tokens == list(range(72))
    for chunk in plan.chunks:
        rows = chunk.tokens.stop - chunk.tokens.start
        assert rows * chunk.columns <= room
        assert chunk.columns >= int(plan.visible_T[chunk.tokens].max())
        bounds = chunk.groups.bounds_G1.tolist()
        assert bounds[0] == 0 and bounds[-1] == rows
        for first, last, request in zip(bounds, bounds[1:], chunk.groups.request_G, strict=False):
            own = plan.request_T[chunk.tokens][first:last]
            assert (own == request).all() and len(own) <= chunk.groups.size


def test_a_graph_keeps_its_shape_while_lengths_grow():
    shapes = []
    for contexts in ([5, 9], [700, 900]):
        plan = plan_selection([1, 1], contexts, 64, torch.empty(4096), columns=1024)
        shapes.append([(c.tokens, c.columns, c.groups.size) for c in plan.chunks])
    assert shapes[0] == shapes[1] == [(slice(0, 2), 1024, 1)]


def test_workspace_for_one_group_is_enough_and_less_is_refused():
    floats = workspace_floats(1000, 64, 50)
    assert floats == 4 * 1024
    plan_selection([50], [950], 64, torch.empty(floats))
    with pytest.raises(ValueError, match=r"4 queries of 1024 keys need 16384 bytes.*has 16380"):
        plan_selection([50], [950], 64, torch.empty(floats - 1))


def test_nothing_to_plan():
    assert plan_selection([], [], 64, torch.empty(0)).chunks == []
