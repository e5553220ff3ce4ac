"""The paged decode kernel against its twin: lengths, pages, verify rows, parts, refreshed parts."""

import pytest
import torch

from kernel_bed import DEVICE, DTYPES, assert_lse, assert_near, fp8_rows, normal, poisoned
from minidsa.attention.kernels.mla_decode import DecodeParts, decode_tiling, mla_decode
from minidsa.attention.kernels.reference import sparse_attention

C, R = 32, 8


class Pages:
    """Requests on shuffled pages, with NaN wherever a request has no row; page 0 is nobody's."""

    def __init__(self, lengths, page_size, dtype, width=C + R):
        self.lengths, self.page_size = lengths, page_size
        per_request = max(-(-max(length, 1) // page_size) for length in lengths)
        count = len(lengths) * per_request
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1
        self.table = order.view(len(lengths), per_request).int()
        self.rows = normal((count + 1) * page_size, width, dtype=dtype, seed=1)
        written = torch.zeros(len(self.rows), dtype=torch.bool)
        for slots, length in zip(self.slots(), lengths, strict=True):
            written[slots[: max(length, 0)]] = True
        self.rows[~written.to(DEVICE)] = torch.nan
        # Padding of the block table is never looked at.
        for request, length in enumerate(lengths):
            self.table[request, -(-max(length, 0) // page_size) :] = 2**31 - 1
        self.table = self.table.to(DEVICE)

    def slots(self):
        positions = torch.arange(self.table.shape[1] * self.page_size)
        pages = self.table.long().cpu()[:, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def expected(self, q, width, latent=C, rows=None):
        slots = self.slots().clamp(max=len(self.rows) - 1).repeat_interleave(width, 0).to(DEVICE)
        visible = [max(0, n - width + j + 1) for n in self.lengths for j in range(width)]
        counts = torch.tensor(visible, device=DEVICE)
        rows = self.rows if rows is None else rows
        return sparse_attention(q, rows, slots, counts, latent)

    def check(self, q, parts, width, dtype):
        with poisoned():
            out, lse = mla_decode(q, self.rows, self.table, self.page_size, parts, C)
        expected, expected_lse = self.expected(q, width)
        assert out.dtype == dtype
        assert_near(out, expected, dtype)
        assert_lse(lse, expected_lse, dtype)


# A chip so small that nothing is cut, and one so large that everything is.
on_chips = pytest.mark.parametrize("processors", [1, 24])


@on_chips
@pytest.mark.parametrize(("page_size", "dtype"), [(1, 0), (3, 1), (16, 1), (64, 0)])
@pytest.mark.parametrize("lengths", [(1,), (64, 128, 1, 33), (65, 0, 200)])
def test_decode(processors, page_size, dtype, lengths):
    dtype = DTYPES[dtype]
    pages = Pages(lengths, page_size, dtype)
    parts = DecodeParts.of(lengths, 3, decode_tiling(3, pages.rows, C), DEVICE, processors)
    pages.check(normal(len(lengths), 3, C + R, dtype=dtype), parts, 1, dtype)


@on_chips
@pytest.mark.parametrize(("width", "heads"), [(2, 1), (3, 9), (8, 1), (2, 20), (5, 7)])
def test_verify_rows_are_causal_among_themselves(processors, width, heads):
    """The last rows of a request may all lie in its last part: the others see nothing of it."""
    dtype = DTYPES[0]
    lengths = (width, 64 + width // 2, 130, 0)
    pages = Pages(lengths, 16, dtype)
    parts = DecodeParts.of(
        lengths, width * heads, decode_tiling(width * heads, pages.rows, C), DEVICE, processors
    )
    pages.check(normal(4 * width, heads, C + R, dtype=dtype), parts, width, dtype)


def test_refreshed_parts_serve_other_lengths():
    dtype = DTYPES[0]
    rows = Pages((300,), 16, dtype).rows
    parts = DecodeParts.of((300, 300, 300), 3, decode_tiling(3, rows, C), DEVICE, 8)
    tensors = (parts.parts_W3, parts.first_B, parts.lengths_B)
    assert len(parts.parts_W3) > 3
    for lengths in ((300, 300, 300), (1, 0, 640), (700, 90, 64)):
        parts.refresh(lengths)
        assert all(
            a is b
            for a, b in zip(tensors, (parts.parts_W3, parts.first_B, parts.lengths_B), strict=True)
        )
        Pages(lengths, 16, dtype).check(normal(3, 3, C + R, dtype=dtype), parts, 1, dtype)


@on_chips
def test_padding_requests_give_zeros_even_if_their_queries_are_nan(processors):
    dtype = DTYPES[1]
    pages = Pages((0, 200, 0), 16, dtype)
    q = normal(6, 3, C + R, dtype=dtype)
    q[:2] = torch.nan
    with poisoned():
        parts = DecodeParts.of((0, 200, 0), 6, decode_tiling(6, pages.rows, C), DEVICE, processors)
        out, lse = mla_decode(q, pages.rows, pages.table, 16, parts, C)
    assert not out[:2].any() and not out[4:].any() and (lse[:2] == -torch.inf).all()
    assert out.isfinite().all()


@on_chips
def test_fp8_rows(processors):
    lengths, latent, rope = (70, 1, 130), 128, 16
    pages = Pages(lengths, 16, torch.float32, latent + rope)
    packed = fp8_rows(pages.rows, latent)
    packed.rows_SX[pages.rows[:, 0].isnan()] = 0xFF
    q = (normal(3, 5, latent + rope) * latent**-0.5).to(DTYPES[0])
    parts = DecodeParts.of(lengths, 5, decode_tiling(5, packed.rows_SX, latent), DEVICE, processors)
    with poisoned():
        out, lse = mla_decode(q, packed.rows_SX, pages.table, 16, parts, latent)
    whole = packed.read(torch.arange(len(pages.rows), device=DEVICE))
    expected, expected_lse = pages.expected(q, 1, latent, whole)
    assert_near(out, expected, torch.bfloat16 if q.is_cuda else torch.float16)
    assert_lse(lse, expected_lse, torch.float16)


def test_what_does_not_fit_is_refused():
    dtype = DTYPES[0]
    pages = Pages((5, 6), 4, dtype)
    parts = DecodeParts.of((5, 6), 3, decode_tiling(3, pages.rows, C), DEVICE)
    q = normal(2, 3, C + R, dtype=dtype)
    with pytest.raises(ValueError, match=r"2 requests of 3 rows .* got 1 tokens of 3 heads"):
        mla_decode(q[:1], pages.rows, pages.table, 4, parts, C)
    with pytest.raises(TypeError, match=r"the cached rows torch\.float64"):
        mla_decode(q, pages.rows.double(), pages.table, 4, parts, C)
