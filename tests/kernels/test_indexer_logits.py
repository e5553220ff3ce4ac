"""Index scores over fp8 pages against plain torch: ragged prompts, decodes, page boundaries."""

from typing import Any

import pytest
import torch

from minidsa.attention.kernels import indexer_logits_hopper
from minidsa.attention.kernels.fp8_rows import (
    FP8,
    IndexPages,
    PlainIndexPages,
    new_index_pages,
    quantise,
)
from minidsa.attention.kernels.indexer_logits import group_size, indexer_logits, query_groups
from minidsa.attention.kernels.indexer_logits_hopper import indexer_logits_hopper as on_hopper
from minidsa.attention.kernels.reference import paged_index_scores

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
# Of sum_n |w_n| |q_n| |k|. Hopper's tensor cores add products of fp8 numbers with about 14 bits:
# 1e-5 was seen, a head left out or a wrong scale is above 1e-3.
FP8_ROUNDING = 2.0**-15


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Bed:
    """Requests in shuffled pages; page 0 and the rest of last pages are NaN."""

    def __init__(self, query_lens, context_lens, *, heads=64, width=128, page=64) -> None:
        lens = list(zip(query_lens, context_lens, strict=True))
        self.query_lens, self.page = query_lens, page
        self.visible = [max(0, c + j + 1) for q, c in lens for j in range(q)]
        pages = [-(-max(0, q + c) // page) for q, c in lens]
        self.pages: Any = new_index_pages(sum(pages) + 1, page, width, DEVICE)
        self.pages.values_NPD.view(torch.uint8).fill_(0x7F)
        self.pages.scales_NP.fill_(NAN)
        order = iter((torch.randperm(sum(pages)) + 1).tolist())
        table = torch.zeros(len(lens), max(pages) + 1, dtype=torch.int32)
        for request, count in enumerate(pages):
            table[request, :count] = torch.tensor([next(order) for _ in range(count)])
        self.table_BP = table.to(DEVICE)
        self.slots_BL = (
            (self.table_BP.long()[:, :, None] * page)
            .add(torch.arange(page, device=DEVICE))
            .flatten(1)
        )
        for request, (q, c) in enumerate(lens):
            slots_T = self.slots_BL[request, : max(0, q + c)]
            self.pages.write(slots_T, torch.randn(len(slots_T), width, device=DEVICE))
        tokens = sum(query_lens)
        q_TnD, scales_Tn = quantise(torch.randn(tokens, heads, width, device=DEVICE))
        self.q_TnD = q_TnD
        self.weights_Tn = torch.randn(tokens, heads, device=DEVICE) * scales_Tn
        self.visible_T = torch.tensor(self.visible, dtype=torch.int32, device=DEVICE)
        self.request = [r for r, count in enumerate(query_lens) for _ in range(count)]

    def expected(self) -> torch.Tensor:
        slots = torch.arange(len(self.pages.values_NPD) * self.page, device=DEVICE)
        return paged_index_scores(
            self.q_TnD,
            self.weights_Tn,
            self.pages.read(slots),
            self.slots_BL[self.request],
            self.visible_T,
        )

    def check_row(self, out_L: torch.Tensor, token: int, expected_L: torch.Tensor) -> None:
        """Within the rounding of fp8 tensor cores on a GPU, of fp32 sums elsewhere."""
        slack_L: torch.Tensor | float = 1e-3 + 1e-4 * expected_L.abs()
        if DEVICE.type == "cuda" and self.q_TnD.dtype == FP8:
            norms_n = self.q_TnD[token].float().norm(dim=-1)
            keys_LD = self.pages.read(self.slots_BL[self.request[token], : len(out_L)])
            slack_L = FP8_ROUNDING * (self.weights_Tn[token].abs() @ norms_n) * keys_LD.norm(dim=-1)
        beyond_L = (out_L - expected_L).abs() - slack_L
        assert bool((beyond_L <= 0).all()), (
            f"token {token}: {float(beyond_L.max())} beyond rounding"
        )

    def check(self, kernel=indexer_logits) -> None:
        """What is visible agrees; what is not keeps the poison that was there."""
        expected_TL = self.expected()
        groups = query_groups(self.query_lens, self.q_TnD.shape[1], DEVICE)
        out_TL = torch.full((len(self.visible), max(self.visible) + 5), NAN, device=DEVICE)
        kernel(
            self.q_TnD,
            self.weights_Tn,
            self.pages,
            self.table_BP,
            groups,
            self.visible_T,
            out_TL,
        )
        for token, seen in enumerate(self.visible):
            assert out_TL[token, seen:].isnan().all()
            self.check_row(out_TL[token, :seen], token, expected_TL[token, :seen])


@pytest.mark.parametrize("heads", [16, 64])
def test_prompts_of_any_length_in_one_batch(heads):
    Bed([5, 1, 7], [0, 3, 130], heads=heads).check()


def test_decodes_at_page_boundaries_and_an_empty_one():
    Bed([1] * 6, [0, 62, 63, 64, -1, 127], heads=32).check()


@pytest.mark.parametrize("width", [2, 3])
def test_verify_of_a_few_tokens(width):
    Bed([width] * 3, [200, 61, -width], heads=32).check()


def test_other_pages_and_widths():
    Bed([3, 2], [40, 15], heads=16, width=32, page=16).check()


def test_keys_of_the_models_dtype_have_no_scales():
    bed = Bed([3, 1], [100, 70], heads=16, width=32)
    slots = torch.arange(len(bed.pages.pages_NX) * bed.page, device=DEVICE)
    keys_SD = bed.pages.read(slots).half()
    bed.pages = PlainIndexPages(keys_SD.view(-1, bed.page, 32))
    bed.q_TnD = torch.randn(4, 16, 32, device=DEVICE).half()
    bed.check()


def test_a_long_context_is_shared_out_among_programs():
    Bed([2], [1500], heads=16, width=64).check()


def test_weights_of_both_signs_and_zeros_survive():
    bed = Bed([2], [70], heads=16)
    bed.weights_Tn[0] = -bed.weights_Tn[0].abs()
    bed.weights_Tn[1] = 0.0
    bed.check()


def test_groups_never_mix_requests():
    groups = query_groups([5, 1, 8], 64, DEVICE)
    assert groups.size == 4
    assert groups.bounds_G1.tolist() == [0, 4, 5, 6, 10, 14]
    assert groups.request_G.tolist() == [0, 0, 1, 2, 2]
    sizes = [(1, 64), (2, 64), (3, 64), (9, 64), (9, 32), (9, 256)]
    assert [group_size(*size) for size in sizes] == [1, 2, 4, 4, 8, 1]


def test_hand_scheduled_kernel_refuses_what_it_cannot_do():
    bed = Bed([1], [70], heads=16)
    groups = query_groups([1], 16, DEVICE)
    assert not indexer_logits_hopper.suits(bed.q_TnD, bed.pages, groups)
    with pytest.raises(ValueError, match="need the portable kernel"):
        bed.check(on_hopper)


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [indexer_logits, on_hopper])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("context", [0, 1, 59, 60, 61, 4000])
def test_prompts_on_a_gpu(kernel, heads, context):
    if kernel is on_hopper and not is_hopper():
        return
    Bed([256, 9, 257], [context, 3, 130], heads=heads).check(kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [indexer_logits, on_hopper])
def test_short_prompts_on_a_gpu(kernel):
    """Short enough for a sanitizer; groups that are not full, and pages that few see."""
    if kernel is on_hopper and not is_hopper():
        return
    Bed([9, 4], [130, 3], heads=64).check(kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 63, 64, 65, 160_000])
@pytest.mark.parametrize("queries", [1, 2, 4, 8])
def test_decodes_on_a_gpu(length, queries):
    Bed([queries] * 3, [length, 5, -queries]).check()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [indexer_logits, on_hopper])
def test_behind_two_billion_bytes_and_elements(kernel):
    """The last pages of a cache of 2.3 GB, and rows of an output of 2.3 billion scores."""
    if kernel is on_hopper and not is_hopper():
        return
    bed = Bed([4], [300])
    far = 2**31 // 8448 + 1000
    pages_NX = torch.empty(far + len(bed.pages.pages_NX), 8448, dtype=torch.uint8, device=DEVICE)
    pages_NX[far:] = bed.pages.pages_NX
    tokens, length = 2**31 // 32768 + 8, 32768
    q_TnD = torch.empty(tokens, 64, 128, device=DEVICE, dtype=FP8)
    weights_Tn = torch.empty(tokens, 64, device=DEVICE)
    q_TnD[-4:], weights_Tn[-4:] = bed.q_TnD, bed.weights_Tn
    visible_T = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    visible_T[-4:] = bed.visible_T
    groups = query_groups([tokens - 4, 4], 64, DEVICE)
    table_BP = torch.cat((bed.table_BP, bed.table_BP)) + far
    out_TL = torch.empty(tokens, length, device=DEVICE)
    kernel(q_TnD, weights_Tn, IndexPages(pages_NX, 64), table_BP, groups, visible_T, out_TL)
    for row, seen in enumerate(bed.visible):
        expected = bed.expected()[row, :seen]
        bed.check_row(out_TL[row - 4, :seen], row, expected)
