"""Kernels of a layer's small operations against the torch they stand for: norms, rope, gate,
the way into the latent space and out of it."""

import pytest
import torch

from kernel_bed import DEVICE, DTYPES, HAS_GPU, assert_near, normal, poisoned
from minidsa.attention.kernels.absorb import absorb_queries, unabsorb_latents
from minidsa.attention.kernels.reference import absorbed_query, unabsorb
from minidsa.model.config import MoeConfig
from minidsa.model.kernels.gate import choose_experts, fp32_product
from minidsa.model.kernels.greedy import greedy_tokens
from minidsa.model.kernels.norm import norm_fp8_rows, norm_rows
from minidsa.model.kernels.queries import IndexParts, finish_queries, rotate_queries
from minidsa.model.layers.embedding import Head
from minidsa.model.layers.linear import Allocator
from minidsa.model.layers.moe import Gate
from minidsa.model.layers.norm import RmsNorm
from minidsa.model.layers.rope import rotate_

CPU = torch.device("cpu")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize("width", [24, 300, 1536])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_of_rows(dtype, width, adds):
    twin = RmsNorm(width, 1e-5, Allocator(dtype, CPU))
    twin.weight_D.copy_(normal(width, seed=1))
    x_TD = normal(5, width + 40, dtype=dtype)[:, 8 : width + 8]
    x_TD[1] = 0.0
    delta_TD = normal(5, width + 8, dtype=dtype, seed=2)[:, 8:] if adds else None
    host_TD = x_TD.cpu().contiguous()
    expected = twin.add(host_TD, None if delta_TD is None else delta_TD.cpu())
    with poisoned():
        out_TD = norm_rows(x_TD, twin.weight_D.to(DEVICE), 1e-5, delta_TD)
    assert torch.equal(x_TD.cpu(), host_TD)
    assert_near(out_TD.cpu(), expected, dtype)
    assert norm_rows(x_TD[:0], twin.weight_D.to(DEVICE), 1e-5).shape == (0, width)


def test_normed_rows_in_fp8_are_those_of_the_norm():
    dtype = DTYPES[-1]
    x_TD, weight_D = normal(3, 384, dtype=dtype), normal(384, dtype=dtype, seed=1)
    with poisoned():
        out_TD, fp8 = norm_fp8_rows(x_TD, weight_D, 1e-6)
    assert torch.equal(out_TD, norm_rows(x_TD, weight_D, 1e-6))
    assert fp8.scales_GT.shape == (3, 3)
    # The interpreter halves a number whose mantissa overflows when it is rounded to fp8.
    error = (fp8.plain() - out_TD.float()).norm() / out_TD.float().norm()
    assert error < (0.04 if HAS_GPU else 0.2)


def test_rows_that_do_not_fit_are_refused():
    x_TD, weight_D = normal(4, 64), normal(64)
    with pytest.raises(ValueError, match=r"dense and alike, got \(3, 64\)"):
        norm_rows(x_TD, weight_D, 1e-6, x_TD[:3])
    with pytest.raises(ValueError, match="multiple of 128 wide, got 64"):
        norm_fp8_rows(x_TD, weight_D, 1e-6)
    with pytest.raises(ValueError, match="elements of a head"):
        rotate_queries(normal(2, 8, 3).transpose(1, 2), torch.ones(2, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="elements of a row are dense"):
        unabsorb_latents(normal(2, 3, 16), normal(3, 16, 8).transpose(1, 2))


@each_dtype
@pytest.mark.parametrize(("heads", "rotated"), [(5, 12), (40, 16)])
@pytest.mark.parametrize("indexes", [False, True])
def test_queries_are_rotated_in_place(dtype, heads, rotated, indexes):
    q_THX = normal(3, heads, 20 + rotated, dtype=dtype)
    angles_TR = torch.view_as_complex(normal(3, rotated // 2, 2, seed=1))
    expected = q_THX.clone()
    rotate_(expected[..., 20:], angles_TR.unsqueeze(1))
    index = IndexParts(normal(3, 6, 32, dtype=dtype, seed=2), normal(4, 3, 6, seed=3), 0.5)
    turned_TnD = index.q_TnD.clone()
    rotate_(turned_TnD[..., :rotated], angles_TR.unsqueeze(1))
    if indexes:
        with poisoned():
            weights_Tn = finish_queries(q_THX[..., 20:], angles_TR, index)
        assert_near(index.q_TnD, turned_TnD, dtype)
        assert_near(weights_Tn, index.parts_STn.sum(dim=0) * 0.5, torch.float32)
    else:
        rotate_queries(q_THX[..., 20:], angles_TR)
    assert_near(q_THX, expected, dtype)
    assert torch.equal(q_THX[..., :20], expected[..., :20])


@each_dtype
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_product_with_fp32_weights(dtype, tokens, monkeypatch):
    monkeypatch.setattr("minidsa.model.kernels.gate.multiprocessors", lambda device: 8)
    x_TD, weight_ED = normal(tokens, 330, dtype=dtype), normal(37, 324, seed=1)
    x_TD = x_TD[:, 3:327]
    with poisoned():
        parts_STE = fp32_product(x_TD, weight_ED)
    assert len(parts_STE) > 1
    expected = (x_TD.double() @ weight_ED.double().t()).float()
    assert_near(parts_STE.sum(dim=0), expected, torch.float32)


@pytest.mark.parametrize(
    "moe",
    [
        MoeConfig(16, 1, 4, 8, 4, 2, 2.5, True),
        MoeConfig(24, 2, 3, 8, 3, 2, 1.0, True),
        MoeConfig(12, 0, 5, 8, 1, 1, 1.5, False),
        MoeConfig(256, 1, 8, 8, 8, 4, 2.5, True),
    ],
    ids=["small", "odd", "no groups", "v3"],
)
@pytest.mark.parametrize("num_parts", [1, 2, 16, 28])
def test_experts_are_chosen_like_the_gate_does(moe, num_parts):
    gate = Gate(moe, 32, Allocator(torch.float32, CPU))
    gate.weight_ED.copy_(normal(moe.num_experts, 32, seed=1) * 0.2)
    gate.bias_E.copy_(normal(moe.num_experts, seed=2) * 0.3)
    # Equal scores: the lower expert comes first.
    gate.weight_ED[5], gate.bias_E[5] = gate.weight_ED[4], gate.bias_E[4]
    count = 40 if HAS_GPU else 6
    x_TD = normal(count, 32).cpu()
    weights_TK, ids_TK = gate(x_TD)
    logits_TE = (x_TD @ gate.weight_ED.t()).to(DEVICE)
    shares_S = normal(num_parts, seed=4).softmax(dim=0)
    parts_STE = shares_S[:, None, None] * logits_TE
    with poisoned():
        chosen_weights, chosen = choose_experts(parts_STE, gate.bias_E.to(DEVICE), moe)
    assert torch.equal(chosen[:, : moe.num_chosen].cpu(), ids_TK)
    assert_near(chosen_weights[:, : moe.num_chosen].cpu(), weights_TK, torch.float32)
    shared = torch.arange(moe.num_shared, device=DEVICE) + moe.num_experts
    assert torch.equal(chosen[:, moe.num_chosen :], shared.expand(count, -1))
    assert chosen_weights[:, moe.num_chosen :].eq(1.0).all()


def test_scores_that_are_no_numbers_choose_experts_that_exist():
    """A request that went wrong must not read outside the weights, and its neighbours are well."""
    moe = MoeConfig(16, 1, 4, 8, 4, 2, 2.5, True)
    parts_STE = normal(1, 3, 16)
    parts_STE[0, 1] = float("nan")
    weights_TK, ids_TK = choose_experts(parts_STE, torch.zeros(16, device=DEVICE), moe)
    assert ids_TK.ge(0).all() and ids_TK.le(16).all()
    assert weights_TK[1, :4].isnan().all()
    assert weights_TK[[0, 2]].isfinite().all()


@each_dtype
@pytest.mark.parametrize("tokens", [0, 1, 19, 130])
@pytest.mark.parametrize(("nope", "latent", "values"), [(24, 48, 24), (128, 512, 128)])
@pytest.mark.parametrize("many_tokens", [17, 1000])
def test_into_the_latent_space_and_out_of_it(
    dtype, tokens, nope, latent, values, many_tokens, monkeypatch
):
    monkeypatch.setattr("minidsa.attention.kernels.absorb.MANY_TOKENS", many_tokens)
    heads, rope = 3, 16
    if not HAS_GPU and tokens * latent > 10_000:
        tokens = 17
    q_THX = normal(tokens, heads, nope + rope, dtype=dtype)
    kv_b_HXC = normal(heads, nope + values, latent, dtype=dtype, seed=1) / latent**0.5
    w_uk_HNC, w_uv_HVC = kv_b_HXC[:, :nope], kv_b_HXC[:, nope:]
    parts = q_THX[..., :nope], q_THX[..., nope:]
    with poisoned():
        absorbed_THX = absorb_queries(parts[0], parts[1], w_uk_HNC, 0.3)
        out_THV = unabsorb_latents(absorbed_THX[..., :latent], w_uv_HVC)
    assert absorbed_THX.is_contiguous() and out_THV.is_contiguous()
    assert absorbed_THX.shape == (tokens, heads, latent + rope)
    if tokens:
        floats = parts[0].float(), parts[1].float()
        expected_THX = absorbed_query(floats[0], floats[1], w_uk_HNC.float(), 0.3)
        assert_near(absorbed_THX, expected_THX, dtype)
        expected_THV = unabsorb(absorbed_THX[..., :latent].float(), w_uv_HVC.float())
        assert_near(out_THV, expected_THV, dtype)


@pytest.mark.parametrize("vocab", [7, 4096, 9000])
def test_the_lowest_of_the_likeliest_tokens(vocab):
    logits_NV = normal(6, vocab + 3, dtype=DTYPES[0])[:, :vocab]
    logits_NV[0, [2, 5]] = 100.0
    logits_NV[1, vocab - 1] = 100.0
    logits_NV[2, 1] = float("nan")
    logits_NV[3, vocab - 1] = float("inf")
    logits_NV[4, 3] = float("-inf")
    logits_NV[5] = 0.0
    with poisoned():
        tokens = greedy_tokens(logits_NV)
    assert tokens.tolist() == [2, vocab - 1, -1, -1, -1, 0]
    # A head whose weight holds the logits of six unit vectors.
    head = Head(vocab, 6, Allocator(torch.float32, CPU))
    head.linear.weight_ED.copy_(logits_NV.nan_to_num(1.0, 1.0, 1.0).t())
    assert head.greedy(torch.eye(6)).tolist()[:2] == tokens.tolist()[:2]
    assert head.greedy(torch.full((1, 6), torch.nan)).tolist() == [-1]
