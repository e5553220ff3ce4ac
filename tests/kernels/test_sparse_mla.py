"""The sparse kernel against its twin: parts, heads, holes in the list, empty rows, fp8 rows."""

import pytest
import torch

from kernel_bed import DEVICE, DTYPES, assert_lse, assert_near, fp8_rows, normal, poisoned
from minidsa.attention.kernels.reference import sparse_attention
from minidsa.attention.kernels.sparse_mla import sparse_mla

C, R, SLOTS = 32, 8, 200


def slots_of(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Slots 1..SLOTS - 1; 0 is never asked for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SLOTS, (tokens, columns), generator=generator).int().to(DEVICE)


def counts_of(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=DEVICE)


def rows_of(dtype: torch.dtype, width: int = C + R) -> torch.Tensor:
    rows = normal(SLOTS, width, dtype=dtype, seed=1)
    rows[0] = torch.nan
    return rows


@pytest.mark.parametrize(
    ("heads", "parts", "dtype"),
    [(1, 1, 0), (4, 3, 0), (4, None, 1), (17, 1, 1), (17, 3, 0), (33, 1, 0), (65, 2, 1)],
)
def test_the_twin(heads, parts, dtype):
    dtype = DTYPES[dtype]
    counts = counts_of(70, 1, 33)
    q, rows, slots = normal(3, heads, C + R, dtype=dtype), rows_of(dtype), slots_of(3, 70)
    with poisoned():
        out, lse = sparse_mla(q, rows, slots, counts, C, num_parts=parts)
    expected, expected_lse = sparse_attention(q, rows, slots, counts, C)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_near(out, expected, dtype)
    assert_lse(lse, expected_lse, dtype)


@pytest.mark.parametrize("columns", [1, 32, 63, 64, 65, 129])
def test_lists_around_a_tile(columns):
    dtype = DTYPES[0]
    counts = counts_of(columns, columns - 1)
    q, rows, slots = normal(2, 2, C + R, dtype=dtype), rows_of(dtype), slots_of(2, columns)
    for parts in (1, 2):
        with poisoned():
            out, lse = sparse_mla(q, rows, slots, counts, C, num_parts=parts)
        expected, expected_lse = sparse_attention(q, rows, slots, counts, C)
        assert_near(out, expected, dtype)
        assert_lse(lse, expected_lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 4])
def test_entries_that_do_not_count_are_never_read(dtype, parts):
    """Holes of -1, any number behind the count, a count above the columns, NaN in unused rows."""
    rows, slots = rows_of(dtype), slots_of(4, 100)
    used = torch.zeros(SLOTS, dtype=torch.bool)
    slots[0, 10:50] = -1
    slots[1, :] = -1
    counts = counts_of(100, 100, 20, 1000)
    for token, count in enumerate((100, 100, 20, 100)):
        used[slots[token, :count].clamp(min=0).long().cpu()] = True
    rows[~used.to(DEVICE)] = torch.nan
    slots[2, 20:] = 2**31 - 1
    q = normal(4, 3, C + R, dtype=dtype)
    with poisoned():
        out, lse = sparse_mla(q, rows, slots, counts, C, num_parts=parts)
    slots[2, 20:] = -1
    expected, expected_lse = sparse_attention(q, rows, slots, counts, C)
    assert_near(out, expected, dtype)
    assert_lse(lse, expected_lse, dtype)
    assert not out[1].any()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_query_without_entries_gives_zeros_even_if_it_is_nan(parts):
    dtype = DTYPES[1]
    q = normal(3, 3, C + R, dtype=dtype)
    q[1] = torch.nan
    with poisoned():
        out, lse = sparse_mla(
            q, rows_of(dtype), slots_of(3, 90), counts_of(90, 0, 40), C, num_parts=parts
        )
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert out.isfinite().all() and lse[0].isfinite().all()


def test_long_integers_and_no_queries():
    dtype = DTYPES[0]
    q, rows, slots, counts = normal(2, 3, C + R, dtype=dtype), rows_of(dtype), slots_of(2, 40), 40
    counts = counts_of(40, 12)
    with poisoned():
        short = sparse_mla(q, rows, slots, counts, C, num_parts=2)
        long = sparse_mla(q, rows, slots.long(), counts.long(), C, num_parts=2)
    assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[1])
    out, lse = sparse_mla(q[:0], rows, slots[:0], counts[:0], C)
    assert out.shape == (0, 3, C) and lse.shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("latent", "rope", "row_bytes"), [(128, 8, None), (256, 64, 416)])
@pytest.mark.parametrize("parts", [1, 2])
def test_fp8_rows(dtype, latent, rope, row_bytes, parts):
    """Against what the rows stand for: what is left is the rounding of fp16 products."""
    rows = rows_of(torch.float32, latent + rope)
    rows[:, :128] *= 1e-3
    rows[50:60, :latent] *= 300
    packed = fp8_rows(rows, latent, row_bytes=row_bytes)
    packed.rows_SX[0] = 0xFF
    q = normal(3, 5, latent + rope, dtype=dtype) * latent**-0.5
    q, slots, counts = q.contiguous(), slots_of(3, 70), counts_of(70, 0, 9)
    with poisoned():
        out, lse = sparse_mla(q, packed.rows_SX, slots, counts, latent, num_parts=parts)
    whole = packed.read(torch.arange(SLOTS, device=DEVICE))
    expected, expected_lse = sparse_attention(q, whole, slots, counts, latent)
    assert_near(out, expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    assert_lse(lse, expected_lse, torch.float16)


def test_what_does_not_fit_is_refused():
    dtype = DTYPES[0]
    q, rows, slots = normal(2, 3, C + R, dtype=dtype), rows_of(dtype), slots_of(2, 8)
    counts = counts_of(8, 8)
    with pytest.raises(TypeError, match=r"the cached rows torch\.float64"):
        sparse_mla(q, rows.double(), slots, counts, C)
    with pytest.raises(ValueError, match="is 40 wide and dense, got 39"):
        sparse_mla(q, rows[:, 1:], slots, counts, C)
    with pytest.raises(ValueError, match=r"2 queries need .* got 1 with stride 1 and 2"):
        sparse_mla(q, rows, slots[:1], counts, C)
    with pytest.raises(ValueError, match="contiguous"):
        sparse_mla(q.transpose(0, 1).contiguous().transpose(0, 1), rows, slots, counts, C)
    with pytest.raises(ValueError, match=r"128 \* n elements, not 32"):
        sparse_mla(q, torch.zeros(9, C + 2 * R, dtype=torch.uint8), slots, counts, C)
