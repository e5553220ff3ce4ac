"""The two byte layouts of fp8 rows, looked at byte by byte."""

import pytest
import torch

from minidsa.attention.kernels.fp8_rows import (
    FP8,
    Fp8LatentRows,
    new_fp8_latent_rows,
    new_index_pages,
    quantise,
)

CPU = torch.device("cpu")


def test_index_page_holds_values_first_and_scales_behind():
    pages = new_index_pages(3, 64, 128, CPU)
    assert pages.pages_NX.shape == (3, 8448) and pages.width == 128
    key_1D = torch.full((1, 128), 2.0)
    key_1D[0, 5] = -448.0
    pages.write(torch.tensor([64 + 7]), key_1D)
    page = pages.pages_NX[1]
    values = page[7 * 128 : 8 * 128].view(FP8).float()
    assert values[0] == 2.0 and values[5] == -448.0
    assert page[8192 + 4 * 7 : 8192 + 4 * 8].view(torch.float32).item() == 1.0
    assert int(page.count_nonzero()) == 128 + 2, "one value each, and 1.0 is 0x3f800000"
    assert not pages.pages_NX[[0, 2]].any()


def test_latent_row_is_656_bytes_in_three_parts():
    rows = new_fp8_latent_rows(2, 512, 64, CPU)
    assert rows.rows_SX.shape == (2, 656)
    latent_1C = torch.cat([torch.full((128,), 448.0 * 2**i) for i in range(4)])[None]
    rope_1R = torch.arange(64.0)[None]
    rows.write(torch.tensor([1]), latent_1C, rope_1R)
    row = rows.rows_SX[1]
    assert (row[:512].view(FP8).float() == 448.0).all()
    assert row[512:528].view(torch.float32).tolist() == [1.0, 2.0, 4.0, 8.0]
    assert torch.equal(row[528:].view(torch.bfloat16).float(), rope_1R[0])
    assert torch.equal(rows.read(torch.tensor([1])), torch.cat((latent_1C, rope_1R), dim=1))
    assert not rows.rows_SX[0].any()


def test_negative_slots_are_skipped():
    pages, rows = new_index_pages(1, 4, 12, CPU), new_fp8_latent_rows(4, 128, 2, CPU)
    slots = torch.tensor([-1, -7])
    pages.write(slots, torch.ones(2, 12))
    rows.write(slots, torch.ones(2, 128), torch.ones(2, 2))
    assert not pages.pages_NX.any() and not rows.rows_SX.any()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales(power_of_two):
    rows = torch.tensor([[0.0, 0.0], [3.0, -5.0], [448.0, 1.0], [1e-6, 0.0]])
    values, scales = quantise(rows, power_of_two=power_of_two)
    expected = torch.tensor([1e-4, 5.0, 448.0, 1e-4]) / 448
    if power_of_two:
        expected = torch.tensor([2.0**-22, 2.0**-6, 1.0, 2.0**-22])
        assert (torch.log2(scales) % 1 == 0).all()
    assert torch.equal(scales, expected)
    assert values[0].float().tolist() == [0.0, 0.0]
    torch.testing.assert_close(values.float() * scales[:, None], rows, atol=1e-5, rtol=2**-4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="takes 20 bytes"):
        new_index_pages(2, 1, 16, CPU)
    with pytest.raises(ValueError, match="not 100"):
        Fp8LatentRows(torch.zeros(1, 120, dtype=torch.uint8), 100)
