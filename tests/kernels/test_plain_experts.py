"""A mixture's experts with weights of 16 bits: grouped products against torch, expert by expert."""

import pytest
import torch

from kernel_bed import DTYPES, normal, poisoned
from minidsa.model.kernels.plain_experts import PlainTiling, plain_experts, reference_experts

FEW, MANY = PlainTiling(16, 64, 128, 4, 3), PlainTiling(64, 128, 64, 4, 3)
# Two products, each rounded to the dtype.
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiling", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
def test_experts_of_odd_widths(dtype, tiling, tokens):
    """Widths that end within a tile, an expert that everybody chooses, and one that nobody does."""
    experts, width, middle = 6, 200, 72
    x_TD = normal(tokens, width, dtype=dtype)
    ids_TK = normal(tokens, experts - 1, seed=3).topk(3).indices
    ids_TK[ids_TK == 4] = 0
    ids_TK = torch.cat((ids_TK, torch.full_like(ids_TK[:, :1], experts - 1)), dim=1)
    weights_TK = normal(tokens, 4, seed=4).abs()
    gate_up_XED = normal(experts, 2 * middle, width, dtype=dtype, seed=5) / 14
    down_XDE = normal(experts, width, middle, dtype=dtype, seed=6) / 8
    with poisoned():
        out_TD = plain_experts(x_TD, ids_TK, weights_TK, gate_up_XED, down_XDE, tiling=tiling)
    assert out_TD.shape == (tokens, width)
    if tokens:
        expected = reference_experts(x_TD, ids_TK, weights_TK, gate_up_XED, down_XDE)
        assert relative(out_TD, expected) < NEAR[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 1000, 3000])
def test_experts_at_the_width_that_is_served(tokens):
    """Moonlight's."""
    x_TD = normal(tokens, 2048, dtype=torch.bfloat16)
    ids_TK = normal(tokens, 64, seed=3).topk(6).indices.contiguous()
    weights_TK = normal(tokens, 6, seed=4).abs()
    gate_up_XED = (normal(64, 2816, 2048, seed=5) / 45).bfloat16()
    down_XDE = (normal(64, 2048, 1408, seed=6) / 37).bfloat16()
    with poisoned():
        out_TD = plain_experts(x_TD, ids_TK, weights_TK, gate_up_XED, down_XDE)
    expected = reference_experts(x_TD, ids_TK, weights_TK, gate_up_XED, down_XDE)
    assert relative(out_TD, expected) < 1e-2
