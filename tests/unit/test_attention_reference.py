"""The plain torch twins against the definition: merging, empty rows, poison, absorbed forms."""

import pytest
import torch
from torch import Tensor

import attention_oracle as oracle
from attention_bed import HEADS, LATENT, NOPE, ROPE, VALUE, assert_close
from minidsa.attention.kernels.reference import (
    absorbed_query,
    expanded_attention,
    latent_attention,
    merge,
    slots_of_positions,
    sparse_attention,
    unabsorb,
)

INF = float("inf")
GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def seed():
    GENERATOR.manual_seed(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def weights() -> oracle.Weights:
    return oracle.Weights(normal(HEADS, NOPE, LATENT), normal(HEADS, VALUE, LATENT), 0.3)


def query_row() -> oracle.Row:
    return oracle.Row(normal(HEADS, NOPE), normal(HEADS, ROPE), torch.empty(0), torch.empty(0))


def absorbed(layer: oracle.Weights, row: oracle.Row) -> Tensor:
    return absorbed_query(row.nope[None], row.rope[None], layer.w_uk, layer.scale)


@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_absorbed_equals_expanded(length):
    layer, row, rows = weights(), query_row(), normal(length, LATENT + ROPE)
    latent = latent_attention(absorbed(layer, row), rows[None], None, LATENT)
    expected, _ = oracle.attend(layer, row, rows[:, :LATENT], rows[:, LATENT:])
    assert_close(unabsorb(latent, layer.w_uv)[0], expected)


def sparse_case(slots: list[list[int]], counts: list[int], dtype: torch.dtype):
    """Twin and oracle over a cache whose other slots are NaN."""
    layer, queries = weights(), [query_row() for _ in slots]
    used = {s for row, n in zip(slots, counts, strict=True) for s in row[:n] if s >= 0}
    cache = torch.full((40, LATENT + ROPE), torch.nan)
    for slot in used:
        cache[slot] = normal(LATENT + ROPE)
    q_THX = torch.cat([absorbed(layer, row) for row in queries])
    out, lse = sparse_attention(
        q_THX, cache, torch.tensor(slots, dtype=dtype), torch.tensor(counts), LATENT
    )
    values = unabsorb(out, layer.w_uv)
    for t, (chosen, count) in enumerate(zip(slots, counts, strict=True)):
        valid = [s for s in chosen[:count] if s >= 0]
        if not valid:
            assert (values[t] == 0).all() and (lse[t] == -INF).all()
            continue
        keys = cache[valid]
        expected, expected_lse = oracle.attend(
            layer, queries[t], keys[:, :LATENT], keys[:, LATENT:]
        )
        assert_close(values[t], expected)
        assert_close(lse[t], expected_lse)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sparse_attention_where_rows_meet(dtype):
    """S29, S36 and the kernel contract: -1 in the middle, counts past the entries, count 0."""
    slots = [[5, 9, 2, 31], [5, -1, 9, 7], [8, 4, -1, -1], [3, 39, 39, 39], [-1] * 4, [1] * 4]
    sparse_case(slots, [4, 4, 4, 1, 4, 0], dtype)


def test_sparse_attention_reads_no_entry_past_the_count():
    """Entries behind the count may be any number at all."""
    layer, row, cache = weights(), query_row(), normal(8, LATENT + ROPE)
    near = torch.tensor([[1, 2, -1]])
    far = torch.tensor([[1, 2, 2**30]])
    q, counts = absorbed(layer, row), torch.tensor([2])
    for a, b in zip(
        sparse_attention(q, cache, near, counts, LATENT),
        sparse_attention(q, cache, far, counts, LATENT),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_sparse_attention_of_a_poisoned_padding_query_is_zero():
    q = torch.full((1, HEADS, LATENT + ROPE), torch.nan)
    cache = torch.full((4, LATENT + ROPE), torch.nan)
    out, lse = sparse_attention(q, cache, torch.tensor([[0, -1]]), torch.tensor([0]), LATENT)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("sliced", [False, True])
def test_expanded_attention_and_its_lse(sliced):
    """Causal, with queries that see nothing; V a slice of a wider tensor (S69)."""
    queries, keys = 5, 9
    q, k = normal(HEADS, queries, 7), normal(HEADS, keys, 7)
    v = normal(HEADS, keys, VALUE + 3)[..., 2 : 2 + VALUE]
    v = v if sliced else v.contiguous()
    visible = torch.tensor([-2, 0, 1, 5, 9])
    out, lse = expanded_attention(q, k, v, visible)
    assert lse.dtype == torch.float32
    assert (out[:, :2] == 0).all() and (lse[:, :2] == -INF).all()
    for t in range(2, queries):
        seen = int(visible[t])
        logits = torch.einsum("hx,hlx->hl", q[:, t], k[:, :seen])
        assert_close(lse[:, t], logits.exp().sum(-1).log())
        assert_close(out[:, t], torch.einsum("hl,hlv->hv", logits.softmax(-1), v[:, :seen]))


def test_expanded_attention_over_no_keys():
    out, lse = expanded_attention(normal(2, 3, 4), normal(2, 0, 4), normal(2, 0, 5), None)
    assert out.shape == (2, 3, 5) and (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("border", [0, 1, 4, 8, 9])
def test_merge_equals_one_pass(border):
    q, k, v = normal(HEADS, 3, 7), normal(HEADS, 9, 7), normal(HEADS, 9, VALUE)
    whole, whole_lse = expanded_attention(q, k, v, None)
    first = expanded_attention(q, k[:, :border], v[:, :border], None)
    second = expanded_attention(q, k[:, border:], v[:, border:], None)
    out, lse = merge(*first, *second)
    assert_close(out, whole)
    assert_close(lse, whole_lse)


def test_merge_with_nothing_changes_nothing():
    out, lse = normal(4, 2, VALUE), normal(4, 2) * 50
    empty, nothing = torch.zeros(4, 2, VALUE), torch.full((4, 2), -INF)
    for pair in (merge(out, lse, empty, nothing), merge(empty, nothing, out, lse)):
        assert torch.equal(pair[0], out) and torch.equal(pair[1], lse)
    both = merge(empty, nothing, empty, nothing)
    assert (both[0] == 0).all() and (both[1] == -INF).all()


def test_merge_of_far_apart_weights_is_finite():
    out = normal(1, 1, VALUE)
    merged, lse = merge(out, torch.tensor([[3e4]]), out * 2, torch.tensor([[-3e4]]))
    assert torch.equal(merged, out) and lse.item() == 3e4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_positions(dtype):
    positions = torch.tensor([[0, 3, 4, 11, -1], [7, -1, -1, -1, 5]], dtype=dtype)
    table = torch.tensor([[5, 2, 9], [1, 3, 0]], dtype=torch.int32)
    expected = [[20, 23, 8, 39, -1], [15, -1, -1, -1, 13]]
    assert slots_of_positions(positions, table, 4).tolist() == expected


def test_slots_of_positions_refuses_other_types_ranks_and_lengths():
    good, table = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"int32 or int64, got torch\.float32"):
        slots_of_positions(good.float(), table, 4)
    with pytest.raises(TypeError, match=r"got torch\.int16"):
        slots_of_positions(good, table.short(), 4)
    with pytest.raises(ValueError, match="2 dimensions, got 1"):
        slots_of_positions(good[0], table, 4)
    with pytest.raises(ValueError, match="past the 8 tokens"):
        slots_of_positions(good + 8, table, 4)
