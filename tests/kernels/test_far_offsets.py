"""Elements behind the first 2^31: what is asked of a kernel there is what it gives near by.

The other kernels' tests of this kind stand beside their own.

pytest -m gpu tests/kernels/test_far_offsets.py
"""

import pytest
import torch

from kernel_bed import assert_lse, assert_near, poisoned
from minidsa.attention.kernels.cache_write import LatentWrite, quantise_index_queries, write_rows
from minidsa.attention.kernels.fp8_rows import FP8, PlainIndexPages, new_fp8_latent_rows
from minidsa.attention.kernels.indexer_logits import indexer_logits, query_groups
from minidsa.attention.kernels.mla_decode import DecodeParts, decode_tiling, mla_decode
from minidsa.attention.kernels.mla_prefill import ExpandedKeys, mla_prefill, prefill_rounds
from minidsa.attention.kernels.reference import expanded_attention, sparse_attention
from minidsa.attention.kernels.sparse_mla import sparse_mla
from minidsa.attention.metadata import Part
from minidsa.model.fp8 import Fp8Weights
from minidsa.model.kernels.fp8_experts import fp8_experts
from minidsa.model.kernels.fp8_linear import fp8_linear
from minidsa.model.kernels.fp8_rows import quantise_rows

pytestmark = pytest.mark.gpu

FAR = 2**31
C, R, X, PAGE = 512, 64, 576, 64
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _room():
    """One test's gigabytes are not kept for the next."""
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=BF16) * scale


@pytest.mark.parametrize("length", [1, 64, 1000, 160_000])
def test_decode_over_fp8_rows(length):
    pages = -(-length // PAGE)
    first = FAR // (656 * PAGE) + 10
    rows = new_fp8_latent_rows((first + pages) * PAGE, C, R, CUDA)
    slots = first * PAGE + torch.arange(length, device=CUDA)
    rows.write(slots, normal(length, C, scale=0.3), normal(length, R, scale=0.3))
    table = torch.arange(first, first + pages, dtype=torch.int32, device=CUDA)[None]
    q = normal(1, 128, X, scale=X**-0.5)
    parts = DecodeParts.of((length,), 128, decode_tiling(128, rows.rows_SX, C), CUDA)
    with poisoned():
        out, lse = mla_decode(q, rows.rows_SX, table, PAGE, parts, C)
    near = torch.arange(length, device=CUDA)[None]
    counts = torch.tensor([length], device=CUDA)
    expected, expected_lse = sparse_attention(q, rows.read(slots), near, counts, C)
    assert_near(out, expected, BF16)
    assert_lse(lse, expected_lse, BF16)


def test_sparse_attention_of_many_queries():
    tokens, heads = 33_000, 128
    q = torch.zeros(tokens, heads, X, device=CUDA, dtype=BF16)
    q[-3:] = normal(3, heads, X, scale=X**-0.5)
    rows = normal(1000, X, scale=0.3)
    slots = torch.randint(0, 1000, (tokens, 64), device=CUDA).int()
    counts = torch.full((tokens,), 64, device=CUDA)
    assert q.numel() > FAR and tokens * heads * C > FAR
    out, lse = sparse_mla(q, rows, slots, counts, C)
    expected, expected_lse = sparse_attention(q[-3:], rows, slots[-3:], counts[-3:], C)
    assert_near(out[-3:], expected, BF16)
    assert_lse(lse[-3:], expected_lse, BF16)


def test_prefill_of_many_tokens():
    """1,040 prompts of 128 tokens and 128 heads: queries, keys, values and results."""
    prompts, each, heads, width = 1040, 128, 128, 128
    tokens = prompts * each
    part = Part(
        (each,) * prompts,
        (0,) * prompts,
        torch.zeros(prompts, 1, dtype=torch.int32, device=CUDA),
    )
    starts = torch.arange(0, tokens, each, device=CUDA)
    slots = starts[:, None] + torch.arange(each, device=CUDA)
    own = slice(tokens - each, tokens)
    q, k = (torch.zeros(tokens, heads, width, device=CUDA, dtype=BF16) for _ in range(2))
    k, v = k.view(heads, tokens, width), torch.zeros_like(k).view(heads, tokens, width)
    q_rope, rows = normal(tokens, heads, R), normal(tokens, X)
    q[own] = normal(each, heads, width)
    k[:, own], v[:, own] = normal(heads, each, width), normal(heads, each, width)
    assert k.numel() > FAR and q.numel() > FAR
    (work,) = prefill_rounds(part, slots, tokens)
    assert torch.equal(work.slots_L, torch.arange(tokens, device=CUDA))
    out, lse = torch.empty_like(q), torch.empty(tokens, heads, device=CUDA)
    scale = (width + R) ** -0.5
    mla_prefill(q, q_rope, ExpandedKeys(k, rows[:, C:], v), work.blocks_X6, scale, out, lse)
    expected, expected_lse = expanded_attention(
        (torch.cat((q[own], q_rope[own]), dim=-1) * scale).transpose(0, 1),
        torch.cat((k[:, own], rows[own, C:].expand(heads, -1, -1)), dim=-1),
        v[:, own],
        torch.arange(1, each + 1, device=CUDA),
    )
    assert_near(out[own], expected.transpose(0, 1), BF16)
    assert_lse(lse[own], expected_lse.transpose(0, 1), BF16)


def test_rows_that_are_written():
    count = FAR // X + 2000
    projected = normal(2, X)
    angles = torch.polar(torch.ones(2, R // 2), torch.randn(2, R // 2)).to(CUDA)
    weight = normal(C)
    near, far = (torch.zeros(n, X, device=CUDA, dtype=BF16) for n in (4, count))
    write_rows(
        projected, angles, torch.tensor([1, 3], device=CUDA), LatentWrite(weight, near), None
    )
    slots = torch.tensor([count - 3, count - 1], device=CUDA)
    write_rows(projected, angles, slots, LatentWrite(weight, far), None)
    assert torch.equal(far[-4:], near) and near[[1, 3]].any(dim=1).all()


def test_index_queries_of_many_tokens():
    tokens = FAR // (64 * 128) + 5
    q, weights = torch.zeros(tokens, 64, 128, device=CUDA, dtype=BF16), normal(tokens, 64).float()
    q[-3:] = normal(3, 64, 128)
    angles = torch.polar(torch.ones(tokens, 32), torch.randn(tokens, 32)).to(CUDA)
    values, scaled = quantise_index_queries(q, weights, angles)
    near, near_scaled = quantise_index_queries(q[-3:], weights[-3:], angles[-3:])
    assert torch.equal(values[-3:].view(torch.uint8), near.view(torch.uint8))
    assert torch.equal(scaled[-3:], near_scaled)


@pytest.mark.parametrize("length", [1, 65, 160_000])
def test_index_keys_of_the_models_dtype(length):
    pages = -(-length // PAGE)
    first = FAR // (PAGE * 128) + 10
    keys = torch.empty(first + pages, PAGE, 128, device=CUDA, dtype=BF16)
    keys[first:] = normal(pages, PAGE, 128)
    table = torch.arange(pages, dtype=torch.int32, device=CUDA)[None]
    q, weights = normal(1, 64, 128), torch.randn(1, 64, device=CUDA)
    visible = torch.tensor([length], dtype=torch.int32, device=CUDA)
    groups = query_groups([1], 64, CUDA)
    far, near = torch.zeros(2, 1, pages * PAGE, device=CUDA)
    indexer_logits(q, weights, PlainIndexPages(keys), table + first, groups, visible, far)
    near_pages = PlainIndexPages(keys[first:].clone())
    indexer_logits(q, weights, near_pages, table, groups, visible, near)
    assert torch.equal(far, near) and near.any()


def fp8_weights(experts: int, rows: int, columns: int) -> Fp8Weights:
    """Only the last two experts are written; the others are NaN."""
    weights = Fp8Weights.empty(experts, rows, columns, CUDA)
    weights.values_XED.view(torch.uint8).fill_(0x7F)
    weights.values_XED[-2:] = torch.randn(2, rows, columns, device=CUDA).to(FP8)
    weights.scales_XBB.uniform_(0.5, 1.5).mul_(columns**-0.5)
    return weights


@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_experts_behind_many_others(tokens):
    experts = 150
    gate_up, down = fp8_weights(experts, 4096, 7168), fp8_weights(experts, 7168, 2048)
    assert gate_up.values_XED.numel() > FAR and down.values_XED.numel() > FAR
    x = normal(tokens, 7168)
    ids = torch.tensor([[0, 1]], device=CUDA).expand(tokens, 2).contiguous()
    weights = torch.rand(tokens, 2, device=CUDA)
    far = fp8_experts(x, ids + experts - 2, weights, gate_up, down)
    few = [Fp8Weights(w.values_XED[-2:], w.scales_XBB[-2:]) for w in (gate_up, down)]
    near = fp8_experts(x, ids, weights, *few)
    assert near.isfinite().all() and near.any()
    torch.testing.assert_close(far, near, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(("columns", "rows"), [(7168, 128), (128, 4096)])
def test_products_of_many_rows(columns, rows):
    """Rows that are quantised, and then results, behind 2^31 elements."""
    tokens = FAR // max(columns, rows) + 100
    x = torch.zeros(tokens, columns, device=CUDA, dtype=BF16)
    x[-70:] = normal(70, columns)
    weight = torch.randn(rows, columns, device=CUDA).to(FP8)
    scales = torch.rand(-(-rows // 128), columns // 128, device=CUDA)
    far = fp8_linear(quantise_rows(x), weight, scales, BF16)
    near = fp8_linear(quantise_rows(x[-70:].contiguous()), weight, scales, BF16)
    assert near.isfinite().all() and near.any()
    torch.testing.assert_close(far[-70:], near, rtol=2**-6, atol=2**-6)
    assert not far[:-70].any()
