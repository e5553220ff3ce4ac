"""What a row becomes on a CPU does not depend on the rows beside it, in any layer, to the last bit.

Sizes are chosen so that each way of computing is met: few rows and many, sums that are cut, more
elements than one thread takes, odd widths.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minidsa.attention.kernels.reference import (
    absorbed_query,
    index_scores,
    latent_attention,
    unabsorb,
)
from minidsa.model.config import MoeConfig
from minidsa.model.layers.elementwise import SHARED_FROM
from minidsa.model.layers.experts import MANY
from minidsa.model.layers.linear import Allocator, Linear
from minidsa.model.layers.mlp import silu_product
from minidsa.model.layers.moe import Moe
from minidsa.model.layers.norm import LayerNorm, RmsNorm
from minidsa.model.layers.products import LONGEST_CHAIN, SAME_ALONE_UP_TO, agrees
from minidsa.model.layers.rope import angle_table, rotate_
from minidsa.model.rope_config import RopeConfig

FP32 = Allocator(torch.float32, torch.device("cpu"))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(11)


def assert_own(function: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """`function` of some rows is those rows of `function` of all; it may overwrite its argument."""
    whole = function(rows.clone())
    for size in (1, 2, 3, 4, 5, 8, 17, 60):
        for first in {0, (len(rows) - size) // 3, len(rows) - size}:
            if first >= 0:
                part = function(rows[first : first + size].clone())
                assert torch.equal(part, whole[first : first + size]), (size, first)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *[(17, 256), (424, 256), (384, 128), (96, 24), (30, LONGEST_CHAIN), (64, 768)],
        *[(40, SAME_ALONE_UP_TO), (40, SAME_ALONE_UP_TO + 1), (24, 3000)],
    ],
)
def test_packed_products(rng, rows, columns):
    linear = Linear(torch.randn(rows, columns, generator=rng))
    linear.pack()
    assert_own(linear, torch.randn(150, columns, generator=rng))


def test_short_sums_have_two_ways_that_agree():
    """On a processor where they do not, a single row is slower; nothing else changes."""
    assert agrees(384, 128)
    assert not agrees(8, LONGEST_CHAIN + 1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("hidden", "width"), [(40, 24), (96, 40), (LONGEST_CHAIN + 64, 32)])
@pytest.mark.parametrize("num_shared", [0, 1])
def test_experts_and_their_gate(rng, hidden, width, num_shared):
    """Few tokens gather, many are sorted by expert."""
    sizes = MoeConfig(8, num_shared, 2, width, 4, 2, 1.5, True)
    moe = Moe(sizes, hidden, FP32)
    for weight in (moe.gate.weight_ED, moe.gate_up_XED, moe.down_XDE):
        weight.copy_(torch.randn(weight.shape, generator=rng) * hidden**-0.5)
    moe.gate.bias_E.copy_(torch.randn(8, generator=rng) * 0.1)
    x = torch.randn(MANY * 8, hidden, generator=rng)
    unpacked = moe(x)
    moe.pack()
    assert_own(moe, x)
    torch.testing.assert_close(moe(x), unpacked, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [24, 32, 96])
def test_silu_even_where_threads_share_the_work(rng, width):
    rows = 2 * SHARED_FROM // width + 3
    assert_own(silu_product, torch.randn(rows, 2 * width, generator=rng) * 3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rotated", [8, 24, 64])
def test_rotation_even_where_threads_share_the_work(rng, rotated):
    heads, rows = 3, SHARED_FROM // rotated + 5
    angles = angle_table(RopeConfig(10000.0, True, None), rotated, rows, FP32.device)
    heads_and_place = torch.randn(rows, heads * (rotated + 4) + 1, generator=rng)
    # The last column tells a row's position.
    heads_and_place[:, -1] = torch.arange(rows)

    def rotated_queries(x: Tensor) -> Tensor:
        q = x[:, :-1].contiguous().view(len(x), heads, rotated + 4)
        rotate_(q[..., 4:], angles[x[:, -1].long()].unsqueeze(1))
        return q

    assert_own(rotated_queries, heads_and_place)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [24, 256, 2048])
def test_norms(rng, width):
    rms, layer = RmsNorm(width, 1e-6, FP32), LayerNorm(width, FP32)
    for weight in (rms.weight_D, layer.weight_D, layer.bias_D):
        weight.copy_(torch.randn(width, generator=rng))
    x = torch.randn(100, width + 5, generator=rng)
    for norm in (rms, layer):
        assert_own(lambda rows, norm=norm: norm(rows[:, 5:]), x)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("heads", "nope", "latent"), [(1, 16, 24), (3, 16, 32), (4, 64, 128), (2, 2, 16), (3, 4, 8)]
)
def test_absorbing_and_values_out(rng, heads, nope, latent):
    w_uk = torch.randn(heads, nope, latent, generator=rng)
    x = torch.randn(70, heads, nope + latent, generator=rng)
    assert_own(lambda q: absorbed_query(q[..., :nope], q[..., nope : nope + 4], w_uk, 0.3), x)
    assert_own(lambda out: unabsorb(out[..., nope:], w_uk), x)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("value", [1, 2, 6])
def test_narrow_values_out(rng, value):
    w_uv = torch.randn(3, value, 32, generator=rng)
    assert_own(lambda out: unabsorb(out, w_uv), torch.randn(70, 3, 32, generator=rng))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("heads", "latent"), [(1, 22), (3, 4), (3, 32), (4, 128)])
@pytest.mark.parametrize("seen", [1, 5, 63, 64, 65, 200, 700])
def test_attention_in_any_tile(rng, heads, latent, seen):
    """With other tokens of the request, other requests, and more hidden keys behind its own."""
    width, tokens = latent + 4, 6
    rows = torch.randn(3, 2048, width, generator=rng)
    q = torch.randn(3, tokens, heads, width, generator=rng)

    def attend(requests: slice, own: slice, length: int) -> Tensor:
        queries = q[requests, own]
        hidden = (torch.arange(length) >= seen).expand(*queries.shape[:2], length)
        out = latent_attention(queries.flatten(1, 2), rows[requests, :length], hidden, latent)
        return out.view(*queries.shape[:3], latent)

    alone = attend(slice(0, 1), slice(2, 3), seen)[0, 0]
    assert alone.isfinite().all()
    for length in {seen, seen + 1, -(-seen // 64) * 64, 704, 1024, 2048}:
        if length >= seen:
            for requests in (slice(0, 1), slice(0, 3)):
                for own in (slice(2, 3), slice(0, 3), slice(0, 6)):
                    found = attend(requests, own, length)[0, 2 - own.start]
                    assert torch.equal(found, alone), (length, requests, own)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("heads", "width"), [(1, 8), (3, 16), (4, 128), (64, 32), (8, 2)])
@pytest.mark.parametrize("length", [3, 17, 100, 300])
def test_index_scores_in_any_tile(rng, heads, width, length):
    q = torch.randn(3, 6, heads, width, generator=rng)
    w = torch.randn(3, 6, heads, generator=rng)
    keys = torch.randn(3, 1100, width, generator=rng)
    alone = index_scores(q[:1, 2:3], w[:1, 2:3], keys[:1, :length])[0, 0]
    for longer in (length, length + 1, 400, 1100):
        tile = index_scores(q, w, keys[:, :longer])
        assert torch.equal(tile[0, 2, :length], alone)
    for cut in {16, length - 16} & set(range(16, length - 15)):
        pieces = index_scores(q[:1], w[:1], keys[:1, :cut], keys[:1, cut:length])
        assert torch.equal(pieces[0, 2], alone)
