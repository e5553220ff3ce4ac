"""Attention of at most 32 query rows on Hopper against its twin, at DeepSeek-V3.2's sizes.

pytest -m gpu tests/kernels/test_few_heads.py
"""

import pytest
import torch

from kernel_bed import assert_lse, assert_near, fp8_rows, poisoned
from minidsa.attention.kernels import few_heads
from minidsa.attention.kernels.mla_decode import DecodeParts, decode_tiling, mla_decode
from minidsa.attention.kernels.reference import sparse_attention
from minidsa.attention.kernels.sparse_mla import sparse_mla, sparse_tiling

pytestmark = pytest.mark.gpu

C, X, PAGE, SLOTS = 512, 576, 64, 3008
CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, device=CUDA, generator=generator).to(dtype)


class Work:
    """Queries over rows of which the first and those of no list are NaN."""

    def __init__(self, tokens: int, heads: int, columns: int, kind: str) -> None:
        self.dtype = FP16 if kind.endswith("fp16") else BF16
        rows = normal(SLOTS, X, dtype=torch.float32, seed=1)
        if kind.startswith("fp8"):
            # Groups of very different size.
            rows[:, :128] *= 1e-3
            rows[100:200, 128:C] *= 100
            packed = fp8_rows(rows, C, row_bytes=672)
            self.rows, self.plain = packed.rows_SX, packed.read(torch.arange(SLOTS, device=CUDA))
            self.rows[0] = 0xFF
        else:
            self.rows = torch.full((SLOTS, X + 8), torch.nan, device=CUDA, dtype=self.dtype)[:, :X]
            self.rows.copy_(rows)
            self.plain = self.rows.clone()
            self.rows[0] = torch.nan
        self.q = normal(tokens, heads, X, dtype=self.dtype, seed=2) * X**-0.5
        generator = torch.Generator(CUDA).manual_seed(3)
        self.slots = torch.randint(
            1, SLOTS, (tokens, columns), device=CUDA, generator=generator
        ).int()
        self.counts = torch.full((tokens,), columns, dtype=torch.int32, device=CUDA)

    def check(self, parts: int | None) -> None:
        heads = self.q.shape[1]
        tiling = sparse_tiling(len(self.q), heads, self.rows, C)
        assert tiling == few_heads.tiling(heads, self.rows.dtype == torch.uint8, len(self.q))
        seen = torch.arange(self.slots.shape[1], device=CUDA) < self.counts[:, None]
        slots = self.slots.where(seen, -1)
        with poisoned():
            out, lse = sparse_mla(
                self.q, self.rows, self.slots, self.counts, C, num_parts=parts, tiling=tiling
            )
        q = self.q.nan_to_num()
        expected, expected_lse = sparse_attention(q, self.plain, slots, self.counts, C)
        assert out.dtype == self.dtype and lse.dtype == torch.float32
        assert_near(out, expected, self.dtype)
        assert_lse(lse, expected_lse, self.dtype)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "fp8 of fp16"])
@pytest.mark.parametrize("heads", [1, 15, 16, 17, 32])
@pytest.mark.parametrize("parts", [None, 1, 3])
def test_the_twin(kind, heads, parts):
    Work(5, heads, 2048, kind).check(parts)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 128, 129, 257, 400])
def test_lists_around_a_tile(kind, columns):
    for parts in (1, 2, 5):
        Work(3, 16, columns, kind).check(parts)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("parts", [None, 1, 4])
def test_holes_short_lists_and_queries_that_see_nothing(kind, heads, parts):
    """A NaN query without any entry among them, and slots of nonsense behind the counts."""
    work = Work(6, heads, 700, kind)
    work.slots[0, 10:300] = -1
    work.slots[1] = -1
    work.slots[5, :640] = -1
    work.counts[2:5] = torch.tensor([0, 1, 333])
    work.counts[5] = 10_000
    work.slots[4, 333:] = 2**31 - 1
    work.q[2] = torch.nan
    work.check(parts)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 300])
def test_steps_of_many_sizes(kind, tokens):
    Work(tokens, 16, 2048, kind).check(None)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_large_scores(kind):
    """The largest score moves from tile to tile, by a lot."""
    work = Work(3, 16, 1500, kind)
    work.q *= 30
    work.check(1)
    work.check(4)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(("heads", "width"), [(16, 1), (16, 2), (4, 8), (3, 5), (32, 1)])
@pytest.mark.parametrize("processors", [1, 7, None])
def test_pages(kind, heads, width, processors):
    """Steps of 1 to 8 tokens a request over shuffled pages, an empty request among them."""
    lengths = (width, 63 + width, 64 + width, 0, 1500)
    work = Work(len(lengths) * width, heads, 1, kind)
    work.q[3 * width : 4 * width] = torch.nan
    pages = (SLOTS // PAGE - 1 - torch.arange(sum(-(-n // PAGE) for n in lengths))).int()
    table = torch.full((len(lengths), 24), 2**31 - 1, dtype=torch.int32)
    taken = 0
    for request, length in enumerate(lengths):
        needed = -(-length // PAGE)
        table[request, :needed] = pages[taken : taken + needed]
        taken += needed
    tiling = decode_tiling(width * heads, work.rows, C)
    assert tiling == few_heads.tiling(width * heads, kind == "fp8", 0)
    parts = DecodeParts.of(lengths, width * heads, tiling, CUDA, processors)
    with poisoned():
        out, lse = mla_decode(work.q, work.rows, table.to(CUDA), PAGE, parts, C)
    own = slice(3 * width, 4 * width)
    assert not out[own].any() and (lse[own] == -torch.inf).all()
    for request, length in enumerate(lengths):
        if length:
            positions = torch.arange(length)
            slots = table[request, positions // PAGE].long() * PAGE + positions % PAGE
            own = slice(request * width, (request + 1) * width)
            counts = torch.arange(length - width + 1, length + 1, device=CUDA)
            slots = slots.to(CUDA).expand(width, -1)
            expected, expected_lse = sparse_attention(work.q[own], work.plain, slots, counts, C)
            assert_near(out[own], expected, work.dtype)
            assert_lse(lse[own], expected_lse, work.dtype)
