"""Layers against their formulas, and the details that separate one DeepSeek from another."""

import dataclasses
import math

import pytest
import torch

import oracle
from checkpoints import T_CPU
from minidsa.model.config import MoeConfig, parse_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.layers.linear import Allocator
from minidsa.model.layers.moe import Gate, Moe
from minidsa.model.layers.norm import LATENT_EPS, LayerNorm, RmsNorm
from minidsa.model.layers.rope import angle_table, half_split_rows, rotate_
from minidsa.model.rope_config import RopeConfig

CPU = torch.device("cpu")
FP32 = Allocator(torch.float32, CPU)
BF16 = Allocator(torch.bfloat16, CPU)
MOE = MoeConfig(8, 1, 2, 16, 4, 2, 1.5, True)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(5)


def test_rms_norm_matches_its_formula(rng):
    norm = RmsNorm(24, 1e-5, FP32)
    norm.weight_D.copy_(torch.randn(24, generator=rng))
    x = torch.randn(7, 30, generator=rng)[:, 3:27]
    x[0] = 0
    double = x.double()
    expected = double / (double.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight_D
    torch.testing.assert_close(norm(x), expected.float(), rtol=1e-6, atol=1e-6)
    assert norm(x)[0].eq(0).all()


def test_norms_of_bf16_take_statistics_in_fp32(rng):
    norm = RmsNorm(64, 1e-6, BF16)
    norm.weight_D.fill_(1)
    x = (torch.randn(5, 64, generator=rng) * 100).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), expected.bfloat16(), rtol=0.008, atol=0)


def test_layer_norm_has_weight_and_bias(rng):
    norm = LayerNorm(16, BF16)
    assert norm.weight_D.dtype == norm.bias_D.dtype == torch.float32
    norm.weight_D.copy_(torch.randn(16, generator=rng))
    norm.bias_D.copy_(torch.randn(16, generator=rng))
    x = torch.randn(3, 16, generator=rng)
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), unit * norm.weight_D + norm.bias_D)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3])
def test_latent_norms_ignore_rms_norm_eps(eps):
    model = DeepseekModel(parse_config(dict(T_CPU) | {"rms_norm_eps": eps}), torch.float32, CPU)
    for layer in model.layers:
        assert layer.attention.q_norm is not None
        assert layer.attention.q_norm.eps == layer.attention.kv_norm.eps == LATENT_EPS == 1e-6
        assert layer.attention_norm.eps == layer.feed_forward_norm.eps == model.norm.eps == eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_adjacent_pairs_in_place(rng, dtype):
    angles = angle_table(RopeConfig(10000.0, True, None), 8, 32, CPU)
    x = torch.randn(6, 3, 20, generator=rng).to(dtype)
    before = x.double()
    rotate_(x[..., 12:], angles[5:11].unsqueeze(1))
    assert torch.equal(x[..., :12].double(), before[..., :12])
    for row in range(6):
        for i in range(4):
            angle = (5 + row) * 10000.0 ** (-2 * i / 8)
            a, b = before[row, :, 12 + 2 * i], before[row, :, 13 + 2 * i]
            turned = torch.stack(
                (
                    a * math.cos(angle) - b * math.sin(angle),
                    a * math.sin(angle) + b * math.cos(angle),
                )
            )
            got = x[row, :, 12 + 2 * i : 14 + 2 * i].T.double()
            tolerance = 1e-5 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(got, turned, rtol=tolerance, atol=tolerance)


def test_half_split_rows_make_pairs_adjacent():
    assert half_split_rows(8, 6) == [0, 3, 1, 4, 2, 5, 6, 7]
    assert half_split_rows(6, 4, start=2) == [0, 1, 2, 4, 3, 5]


@pytest.mark.parametrize(
    ("theta", "betas", "low", "high"), [(1e4, (32, 1), 10, 23), (5e4, (1, 1), 19, 20)]
)
def test_yarn_ramp_of_published_models(theta, betas, low, high):
    """V3.2 and Kimi K2: dimensions up to `low` keep their frequency, from `high` on they slow."""
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    raw = {"model_type": "deepseek_v32", "rope_theta": theta, "rope_scaling": scaling}
    angles = angle_table(parse_config(raw).rope, 64, 2, CPU)[1].angle().double()
    plain = theta ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(angles[: low + 1], plain[: low + 1], rtol=1e-5, atol=0)
    torch.testing.assert_close(angles[high:], plain[high:] / 40, rtol=1e-4, atol=0)
    assert ((angles < plain * 0.999) & (angles > plain / 40 * 1.001))[low + 1 : high].all()


def make_gate(rng, moe=MOE, hidden=12):
    gate = Gate(moe, hidden, FP32)
    gate.weight_ED.copy_(torch.randn(moe.num_experts, hidden, generator=rng))
    gate.bias_E.copy_(torch.randn(moe.num_experts, generator=rng))
    return gate


def test_gate_bias_selects_and_never_weighs(rng):
    gate = make_gate(rng)
    x = torch.randn(64, 12, generator=rng)
    weights, ids = gate(x)
    scores = (x @ gate.weight_ED.T).sigmoid().gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True) * 1.5)
    raw = Gate(dataclasses.replace(MOE, normalise=False, scale=1.0), 12, FP32)
    raw.weight_ED, raw.bias_E = gate.weight_ED, gate.bias_E
    torch.testing.assert_close(raw(x)[0], scores)


def test_gate_excludes_groups_even_when_every_ranking_is_negative(rng):
    gate = make_gate(rng)
    gate.bias_E.fill_(-5.0)
    _, ids = gate(torch.randn(64, 12, generator=rng))
    for row in ids.tolist():
        assert len(set(row)) == 2
    # One group allowed: both experts come from it, whatever the others score.
    narrow = dataclasses.replace(MOE, num_chosen_groups=1)
    gate.moe = narrow
    _, ids = gate(torch.randn(64, 12, generator=rng))
    assert (ids[:, 0] // 2 == ids[:, 1] // 2).all()


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_gate_ties_go_to_the_lowest_id(num_groups):
    gate = Gate(dataclasses.replace(MOE, num_groups=num_groups, num_chosen_groups=1), 12, FP32)
    gate.weight_ED.zero_()
    gate.bias_E.zero_()
    _, ids = gate(torch.ones(3, 12))
    assert ids.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_num_14_experts_equal_one_token_at_a_time(rng, num_shared, tokens):
    """Shared experts ride along as experts everybody chooses; the oracle computes them apart."""
    hidden = 12
    moe = Moe(dataclasses.replace(MOE, num_shared=num_shared), hidden, FP32)
    moe.gate = make_gate(rng, moe.moe)
    # Two experts with equal weights: the two best of some tokens tie exactly.
    moe.gate.weight_ED[1] = moe.gate.weight_ED[0]
    moe.gate.bias_E[1] = moe.gate.bias_E[0]
    moe.gate_up_XED.copy_(torch.randn(moe.gate_up_XED.shape, generator=rng))
    moe.down_XDE.copy_(torch.randn(moe.down_XDE.shape, generator=rng) * 0.3)
    tensors = {
        "mlp.gate.weight": moe.gate.weight_ED,
        "mlp.gate.e_score_correction_bias": moe.gate.bias_E,
    }
    for e in range(8):
        gate, up = moe.gate_up_XED[e].chunk(2)
        for name, weight in (("gate", gate), ("up", up), ("down", moe.down_XDE[e])):
            tensors[f"mlp.experts.{e}.{name}_proj.weight"] = weight
    gate, up = moe.gate_up_XED[8:].chunk(2, dim=1)
    for name, weight in (("gate", gate), ("up", up)):
        tensors[f"mlp.shared_experts.{name}_proj.weight"] = weight.flatten(0, 1)
    tensors["mlp.shared_experts.down_proj.weight"] = moe.down_XDE[8:].transpose(0, 1).flatten(1)
    config = dict(T_CPU) | {"first_k_dense_replace": 0, "n_shared_experts": num_shared}
    x = torch.randn(tokens, hidden, generator=rng)
    expected = oracle.feed_forward(tensors, "", config, x)
    torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-5)


def test_num_20_experts_survive_rows_of_nan(rng):
    moe = Moe(MOE, 12, FP32)
    moe.gate = make_gate(rng)
    moe.gate_up_XED.copy_(torch.randn(moe.gate_up_XED.shape, generator=rng))
    moe.down_XDE.copy_(torch.randn(moe.down_XDE.shape, generator=rng))
    x = torch.randn(9, 12, generator=rng)
    clean = moe(x)
    x[4] = torch.nan
    dirty = moe(x)
    assert dirty[4].isnan().all()
    others = [i for i in range(9) if i != 4]
    torch.testing.assert_close(dirty[others], clean[others], rtol=1e-5, atol=1e-6)
