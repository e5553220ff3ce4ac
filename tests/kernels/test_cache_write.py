"""The fused writes against norms, rope and row layouts in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from minidsa.attention.kernels.cache_write import (
    IndexWrite,
    LatentWrite,
    quantise_index_queries,
    write_rows,
)
from minidsa.attention.kernels.fp8_rows import (
    Fp8LatentRows,
    new_fp8_latent_rows,
    new_index_pages,
    quantise,
)
from minidsa.model.layers.rope import rotate_

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter rounds neither to bf16 nor, where a mantissa overflows or is denormal, to fp8.
DTYPES = (
    [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float16, torch.float32]
)
EPS = 1e-6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Tokens:
    """Projected rows inside wider ones, and what should be written of them."""

    def __init__(self, dtype, latent, rope, index, slots) -> None:
        tokens = len(slots)
        wide = torch.randn(tokens, latent + rope + index + 24, device=DEVICE).to(dtype)
        self.projected_TE = wide[:, 8 : 8 + latent + rope + index]
        turns = torch.randn(tokens, rope // 2, device=DEVICE)
        self.angles_TR = torch.polar(torch.ones_like(turns), turns)
        self.slots_T = torch.tensor(slots, device=DEVICE)
        self.weight_C = torch.randn(latent, device=DEVICE).to(dtype)
        self.weight_D, self.bias_D = torch.randn(2, index, device=DEVICE)
        self.latent_TC, self.rope_TR, self.keys_TD = self._rows(latent, rope, index)

    def _rows(self, latent, rope, index):
        x_TE = self.projected_TE
        k, c, kr = x_TE.split((index, latent, rope), dim=1)
        c = c.float()
        c = (c * torch.rsqrt(c.pow(2).mean(dim=1, keepdim=True) + EPS)).to(x_TE.dtype)
        kr = kr.clone()
        rotate_(kr, self.angles_TR)
        k = F.layer_norm(k.float(), (index,), self.weight_D, self.bias_D, EPS).to(x_TE.dtype)
        rotate_(k[:, :rope], self.angles_TR)
        return c * self.weight_C, kr, k

    def write(self, latent_cache, index_cache, **options) -> None:
        index = IndexWrite(self.weight_D, self.bias_D, index_cache)
        latent = LatentWrite(self.weight_C, latent_cache)
        write_rows(
            self.projected_TE,
            self.angles_TR,
            self.slots_T,
            latent,
            index if index_cache is not None else None,
            EPS,
            **options,
        )


def same_fp8(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bytes but for neighbours where the statistics were rounded otherwise."""
    out, expected = out.view(torch.uint8).int(), expected.view(torch.uint8).int()
    if not ON_GPU:
        exact = (expected & 7 != 0) & (expected & 0x78 != 0)
        out, expected = out[exact], expected[exact]
    assert ((out - expected).abs() <= 1).all()
    assert (out != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_rows(dtype):
    slots = [3, -1, 17, 40, 0]
    tokens = Tokens(dtype, 64, 16, 32, slots)
    latent = torch.full((64, 80), 7.0, device=DEVICE).to(dtype)
    index = torch.full((64, 32), 7.0, device=DEVICE).to(dtype)
    tokens.write(latent, index)
    kept = tokens.slots_T >= 0
    rows = torch.cat((tokens.latent_TC, tokens.rope_TR), dim=1)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 1e-3)
    written = tokens.slots_T[kept]
    torch.testing.assert_close(latent[written], rows[kept], rtol=rtol, atol=atol)
    torch.testing.assert_close(index[written], tokens.keys_TD[kept], rtol=rtol, atol=atol)
    untouched = [slot for slot in range(64) if slot not in slots]
    assert (latent[untouched] == 7.0).all() and (index[untouched] == 7.0).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_rows(dtype, power_of_two):
    slots = [3, -1, 17, 63, 0, 64]
    tokens = Tokens(dtype, 256, 16, 32, slots)
    latent, expected_latent = (new_fp8_latent_rows(65, 256, 16, DEVICE) for _ in range(2))
    index, expected_index = (new_index_pages(5, 16, 32, DEVICE) for _ in range(2))
    tokens.write(latent, index, power_of_two=power_of_two)
    expected_latent.write(
        tokens.slots_T, tokens.latent_TC, tokens.rope_TR, power_of_two=power_of_two
    )
    expected_index.write(tokens.slots_T, tokens.keys_TD, power_of_two=power_of_two)
    torch.testing.assert_close(latent.scales_SB, expected_latent.scales_SB)
    torch.testing.assert_close(index.scales_NP, expected_index.scales_NP)
    if ON_GPU:
        assert torch.equal(latent.rope_SR, expected_latent.rope_SR)
    same_fp8(latent.values_SC, expected_latent.values_SC)
    same_fp8(index.values_NPD, expected_index.values_NPD)


def test_zero_rows_stay_finite():
    tokens = Tokens(torch.float32, 128, 4, 16, [1])
    tokens.projected_TE.zero_()
    tokens.bias_D.zero_()
    latent, index = new_fp8_latent_rows(2, 128, 4, DEVICE), new_index_pages(1, 4, 16, DEVICE)
    tokens.write(latent, index)
    assert (latent.read(torch.tensor([1], device=DEVICE)) == 0).all()
    assert (index.read(torch.tensor([1], device=DEVICE)) == 0).all()


def test_layers_without_an_indexer_and_steps_without_tokens():
    tokens = Tokens(torch.float32, 32, 8, 16, [2, 5])
    latent = torch.zeros(8, 40, device=DEVICE)
    tokens.write(latent, None)
    assert latent[[2, 5]].any(dim=1).all() and not latent[[0, 1, 3, 4, 6, 7]].any()
    tokens.projected_TE, tokens.angles_TR = tokens.projected_TE[:0], tokens.angles_TR[:0]
    tokens.slots_T = tokens.slots_T[:0]
    tokens.write(latent, None)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_index_queries(dtype, rotated):
    q_TnD = torch.randn(5, 4, 32, device=DEVICE).to(dtype)
    weights_Tn = torch.randn(5, 4, device=DEVICE)
    angles_TR = torch.polar(torch.ones(5, 8), torch.randn(5, 8)).to(DEVICE)
    q8_TnD, scaled_Tn = quantise_index_queries(q_TnD, weights_Tn, None if rotated else angles_TR)
    expected_TnD = q_TnD.clone()
    if not rotated:
        rotate_(expected_TnD[..., :16], angles_TR.unsqueeze(1))
    values_TnD, scales_Tn = quantise(expected_TnD)
    same_fp8(q8_TnD, values_TnD)
    torch.testing.assert_close(scaled_Tn, weights_Tn * scales_Tn)


def test_wrong_types_are_named():
    tokens = Tokens(torch.float32, 32, 8, 16, [2])
    tokens.slots_T = tokens.slots_T.int()
    with pytest.raises(TypeError, match=r"torch\.int32"):
        tokens.write(torch.zeros(8, 40, device=DEVICE), None)


@pytest.mark.gpu
def test_shapes_of_the_model_behind_two_billion_bytes():
    """656-byte rows and 8448-byte pages, a slot behind 2^31 bytes of each."""
    far = 2**31 // 128 + 12345
    rows_SX = torch.zeros(far + 1, 656, dtype=torch.uint8, device=DEVICE)
    tokens = Tokens(torch.bfloat16, 512, 64, 128, [far, 64, 63, 0, *range(1000, 5097)])
    latent = Fp8LatentRows(rows_SX, 512)
    index = new_index_pages(far // 64 + 1, 64, 128, DEVICE)
    tokens.write(latent, index)
    for row in (0, 1, 2, 3, -1):
        slot = tokens.slots_T[row : row + 1] if row >= 0 else tokens.slots_T[-1:]
        read = latent.read(slot)[0]
        expected = torch.cat((tokens.latent_TC[row], tokens.rope_TR[row])).float()
        torch.testing.assert_close(read, expected, rtol=0.08, atol=0.02)
        torch.testing.assert_close(
            index.read(slot)[0], tokens.keys_TD[row].float(), rtol=0.08, atol=0.02
        )
