"""Products with block-scaled fp8 weights: rows, one weight, and a mixture's experts."""

import pytest
import torch

from kernel_bed import DEVICE, HAS_GPU, normal, poisoned
from minidsa.attention.kernels.fp8_rows import FP8
from minidsa.model.fp8 import Fp8Weights, dequantise, quantise
from minidsa.model.kernels.expert_groups import group_pairs
from minidsa.model.kernels.fp8_experts import (
    fp8_experts,
    grouped_product,
    quantised,
    reference_experts,
)
from minidsa.model.kernels.fp8_hopper import hopper_experts, hopper_linear
from minidsa.model.kernels.fp8_linear import ProductTiling, fp8_linear
from minidsa.model.kernels.fp8_rows import Fp8Rows, quantise_rows
from minidsa.model.layers.fp8 import Fp8Linear

# fp16 where kernels are interpreted: the interpreter's bf16 is not to be relied on.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
ROUNDING = 1e-2 if HAS_GPU else 2e-3
# The interpreter halves a number whose mantissa overflows when it is rounded to fp8.
QUANTISING = 1e-2 if HAS_GPU else 0.2
# Between two products a rounding of fp8, where a little more or less is a step of one in sixteen.
TWICE = 3e-2 if HAS_GPU else 0.3
# One program sums up all columns.
ONE_PART = ProductTiling(64, 64, 4, 3, 0)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def block_scaled(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    values_ED, scales = quantise(normal(rows, columns, seed=seed).cpu() / columns**0.5)
    # Blocks of very different size, so that a scale in the wrong place shows.
    factor = torch.exp2(torch.arange(scales.numel()) % 5).view_as(scales)
    return values_ED.to(DEVICE), (scales * factor).to(DEVICE)


def expert_weights(count: int, rows: int, columns: int, seed: int) -> Fp8Weights:
    made = [block_scaled(rows, columns, seed + x) for x in range(count)]
    values = torch.stack([v.view(torch.uint8) for v, _ in made]).view(FP8)
    return Fp8Weights(values, torch.stack([s for _, s in made]))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_are_quantised_by_groups(power_of_two):
    wide_TX = normal(5, 400, dtype=DTYPE)
    x_TD = wide_TX[:, 16:400]
    with poisoned():
        rows = quantise_rows(x_TD, power_of_two=power_of_two)
    assert relative(rows.plain(), x_TD.float()) < 0.04 + QUANTISING
    if power_of_two:
        assert torch.equal(rows.scales_GT.log2().round(), rows.scales_GT.log2())
    else:
        assert relative(rows.plain(), quantised(x_TD)) < QUANTISING


def test_silu_product_is_quantised_without_being_written():
    x = normal(3, 512, dtype=DTYPE)
    x[1] = 0.0
    gate, up = x.float().chunk(2, dim=1)
    expected = quantised(torch.nn.functional.silu(gate) * up)
    assert relative(quantise_rows(x, swiglu=True).plain(), expected) < QUANTISING
    assert not quantise_rows(x, swiglu=True).plain()[1].any()


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="multiple of 128 wide, got"):
        quantise_rows(normal(2, 100))
    with pytest.raises(ValueError, match="half of it gate"):
        quantise_rows(normal(2, 384), swiglu=True)
    weight_ED, scales = block_scaled(256, 128, 0)
    with pytest.raises(ValueError, match=r"scales \(2, 1\)"):
        fp8_linear(quantise_rows(normal(2, 128)), weight_ED, scales[:1], DTYPE)


@pytest.mark.parametrize("tokens", [0, 1, 3, 17, 40, 70])
@pytest.mark.parametrize("rows", [128, 300])
def test_product_with_a_weight(tokens, rows):
    """300 rows end within a block, which is where libraries write NaN."""
    x = quantise_rows(normal(tokens, 384, dtype=DTYPE))
    weight_ED, scales = block_scaled(rows, 384, 1)
    with poisoned():
        out_TE = fp8_linear(x, weight_ED, scales, DTYPE)
    assert out_TE.shape == (tokens, rows)
    if tokens:
        assert relative(out_TE, x.plain() @ dequantise(weight_ED, scales).t()) < ROUNDING


def test_columns_are_shared_out_among_programs(monkeypatch):
    monkeypatch.setattr("minidsa.model.kernels.fp8_linear.multiprocessors", lambda device: 8)
    x, (weight_ED, scales) = quantise_rows(normal(3, 1280)), block_scaled(130, 1280, 1)
    tiling = ProductTiling(16, 64, 4, 3, 1)
    with poisoned():
        out_TE = fp8_linear(x, weight_ED, scales, torch.float32, tiling=tiling)
    assert relative(out_TE, x.plain() @ dequantise(weight_ED, scales).t()) < 1e-3


@pytest.mark.parametrize("most_ranked", [0, 1000])
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_pairs_are_grouped_by_expert(tile_rows, most_ranked, monkeypatch):
    monkeypatch.setattr("minidsa.model.kernels.expert_groups.MOST_RANKED", most_ranked)
    ids_TK = torch.randint(0, 7, (61, 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids_TK[ids_TK == 2] = 5
    with poisoned():
        groups = group_pairs(ids_TK, 9, tile_rows)
    assert torch.equal(groups.order_P.long(), ids_TK.flatten().argsort(stable=True))
    sorted_ids = ids_TK.flatten()[groups.order_P.long()].tolist()
    covered = []
    for expert, first, last in groups.tiles_N3.tolist():
        if expert < 0:
            continue
        assert 0 < last - first <= tile_rows
        assert set(sorted_ids[first:last]) == {expert}
        covered += range(first, last)
    assert covered == list(range(61 * 3))


@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
def test_experts(tokens):
    experts, width, middle = 6, 256, 128
    x_TD = normal(tokens, width, dtype=DTYPE)
    scores = normal(tokens, experts, seed=3)
    ids_TK = scores.topk(3).indices.contiguous()
    ids_TK[ids_TK == 4] = 0
    weights_TK = normal(tokens, 3, seed=4).abs()
    gate_up = expert_weights(experts, 2 * middle, width, 10)
    down = expert_weights(experts, width, middle, 20)
    with poisoned():
        out_TD = fp8_experts(x_TD, ids_TK, weights_TK, gate_up, down)
    assert out_TD.shape == (tokens, width)
    if tokens:
        expected = reference_experts(x_TD, ids_TK, weights_TK, gate_up, down)
        assert relative(out_TD, expected) < TWICE


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 1000, 4097])
def test_experts_at_the_width_that_is_served(tokens):
    """A shared expert that all tokens choose, and most experts without any token."""
    x_TD = normal(tokens, 7168, dtype=DTYPE)
    ids_TK = normal(tokens, 32, seed=3).topk(4).indices
    ids_TK = torch.cat((ids_TK // 2, torch.full_like(ids_TK[:, :1], 32)), dim=1).contiguous()
    weights_TK = normal(tokens, 5, seed=4).abs()
    gate_up = expert_weights(33, 4096, 7168, 10)
    down = expert_weights(33, 7168, 2048, 50)
    with poisoned():
        out_TD = fp8_experts(x_TD, ids_TK, weights_TK, gate_up, down)
    expected = reference_experts(x_TD, ids_TK, weights_TK, gate_up, down)
    assert relative(out_TD, expected) < TWICE


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_rows_of_zeros_behind_others(tokens):
    x = quantise_rows(normal(tokens, 256, dtype=DTYPE))
    padded = x.padded(4)
    assert padded.values_TD.shape == (-(-tokens // 4) * 4, 256)
    assert torch.equal(padded.plain()[:tokens], x.plain()) and not padded.plain()[tokens:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [640, 576])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 66, 67, 68, 1001, 4099])
def test_a_layer_of_any_number_of_rows(tokens, rows):
    """From 65 rows on cuBLAS multiplies, which takes them by fours alone, and whole blocks."""
    with poisoned():
        layer = Fp8Linear(rows, 1152, torch.device(DEVICE))
    weight_ED, scales = block_scaled(rows, 1152, 1)
    layer.weight_ED.copy_(weight_ED)
    layer.scales.copy_(scales)
    x_TD = normal(tokens, 1152, dtype=DTYPE)
    with poisoned():
        out_TE = layer(x_TD)
    expected = quantise_rows(x_TD).plain() @ dequantise(weight_ED, scales).t()
    assert out_TE.shape == (tokens, rows) and out_TE.dtype == DTYPE
    assert relative(out_TE, expected) < ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 128, 300])
@pytest.mark.parametrize("rows", [8, 264, 2048])
def test_product_by_hand(tokens, rows):
    """Weights that end within a block or within half of a tile; more tiles than programs too."""
    x = quantise_rows(normal(tokens, 1152, dtype=DTYPE))
    weight_ED, scales = block_scaled(rows, 1152, 1)
    out_TE = torch.full((tokens, rows), float("nan"), dtype=DTYPE, device=DEVICE)
    hopper_linear(x, weight_ED, scales, out_TE)
    assert relative(out_TE, x.plain() @ dequantise(weight_ED, scales).t()) < ROUNDING
    # Whether a prompt's rows or a step's were many must not show.
    assert torch.equal(out_TE, fp8_linear(x, weight_ED, scales, DTYPE, tiling=ONE_PART))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_experts_by_hand(tokens):
    """An expert that everybody chooses and some that nobody does; more tiles than programs too."""
    experts, width, middle = 20, 1024, 256
    x = quantise_rows(normal(tokens, width, dtype=DTYPE))
    ids_TK = normal(tokens, 17, seed=3).topk(3).indices
    ids_TK = torch.cat((ids_TK, torch.full_like(ids_TK[:, :1], 19)), dim=1).contiguous()
    gate_up = expert_weights(experts, 2 * middle, width, 10)
    down = expert_weights(experts, width, middle, 50)
    groups, pairs = group_pairs(ids_TK, experts, 128), ids_TK.numel()
    portable = group_pairs(ids_TK, experts, 16)
    with poisoned():
        plain_PE, own_PE, out_PD, own_PD = (
            torch.empty(pairs, size, dtype=DTYPE, device=DEVICE)
            for size in (2 * middle, 2 * middle, width, width)
        )
        product = Fp8Rows.empty(pairs, middle, DEVICE)
    hopper_experts(x, gate_up, groups, 4, plain_PE)
    assert torch.equal(
        plain_PE, grouped_product(x, gate_up, portable, 4, ProductTiling(16, 128, 4, 3, 1), own_PE)
    )
    hopper_experts(x, gate_up, groups, 4, product)
    expected = quantise_rows(plain_PE, swiglu=True)
    # silu differs in the last place.
    torch.testing.assert_close(product.scales_GT, expected.scales_GT, rtol=1e-6, atol=0)
    assert relative(product.plain(), expected.plain()) < 1e-3
    hopper_experts(product, down, groups, 0, out_PD)
    assert torch.equal(
        out_PD, grouped_product(product, down, portable, 0, ProductTiling(16, 128, 4, 3, 1), own_PD)
    )


@pytest.mark.gpu
def test_groups_of_other_tiles_are_refused_by_hand():
    x, weights = quantise_rows(normal(2, 128, dtype=DTYPE)), expert_weights(2, 128, 128, 0)
    groups = group_pairs(torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), 2, 64)
    with pytest.raises(ValueError, match="tiles of 128 rows here, not 64"):
        hopper_experts(x, weights, groups, 1, torch.empty(2, 128, dtype=DTYPE, device=DEVICE))
