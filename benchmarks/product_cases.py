"""Products with block-scaled fp8 weights at DeepSeek-V3.2's shapes: one weight, and experts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import Case, Entry, Section, closeness, floor_us
from benchmarks.peers import Peers
from minidsa.attention.kernels.fp8_rows import FP8
from minidsa.model.fp8 import Fp8Weights, dequantise
from minidsa.model.kernels.expert_groups import Groups, group_pairs
from minidsa.model.kernels.fp8_experts import (
    fp8_experts,
    grouped_product,
    quantised,
    reference_experts,
)
from minidsa.model.kernels.fp8_hopper import hopper_experts, hopper_linear
from minidsa.model.kernels.fp8_linear import ProductTiling, fp8_linear
from minidsa.model.kernels.fp8_rows import Fp8Rows, quantise_rows

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
TOLERANCE = 6e-3
# Where a rounding to fp8 lies between two products.
TWICE = 3e-2
# Query latent up, attention out, an expert's gate and up, an expert's down.
SHAPES = [(24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)]
EXPERTS = 64


def random_weight(*shape: int) -> tuple[Tensor, Tensor]:
    """e4m3 values and scales of blocks of 128 x 128; every value is possible, NaN aside."""
    values = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=DEVICE)
    values |= torch.randint(0, 2, shape, dtype=torch.uint8, device=DEVICE) << 7
    scales = torch.rand(*shape[:-2], shape[-2] // 128, shape[-1] // 128, device=DEVICE)
    return values.view(FP8), (scales + 0.5) / 448 / shape[-1] ** 0.5


def tilings(rows: int) -> list[ProductTiling]:
    """What is worth a try for so many rows of a tile or fewer."""
    if rows <= 16:
        return [ProductTiling(16, n, 4, s, p) for n, s, p in SMALL]
    if rows <= 64:
        return [ProductTiling(64, n, 4, s, p) for n, s, p in SMALL]
    return [ProductTiling(128, 128, 8, 3, 1), *(ProductTiling(64, n, 4, s, p) for n, s, p in SMALL)]


SMALL = [(64, 4, 2), (64, 6, 2), (128, 3, 2), (128, 4, 2), (128, 5, 1)]


def named(tiling: ProductTiling) -> str:
    warps, stages = tiling.num_warps, tiling.num_stages
    return f"minidsa {tiling.rows}x{tiling.weight_rows} w{warps} s{stages} p{tiling.programs}"


def linear(peers: Peers, quick: bool) -> Iterator[Case]:
    """One weight; 1, 16 and 64 rows as in decode steps, more as in prompts."""
    for rows, columns in SHAPES[1:3] if quick else SHAPES:
        weight_ED, scales = random_weight(rows, columns)
        for tokens in (1, 64, 8192) if quick else (1, 16, 64, 128, 512, 2048, 8192):
            x = quantise_rows(torch.randn(tokens, columns, device=DEVICE, dtype=BF16))
            expected = x.plain() @ dequantise(weight_ED, scales).t()
            check = partial(_check, expected=expected)
            entries = [_entry("minidsa", partial(fp8_linear, x, weight_ED, scales, BF16), check)]
            for tiling in [] if quick else tilings(tokens):
                run = partial(fp8_linear, x, weight_ED, scales, BF16, tiling=tiling)
                entries.append(_entry(named(tiling), run, check))
            if tokens > 64:
                out_TE = torch.empty(tokens, rows, dtype=BF16, device=DEVICE)
                run = partial(hopper_linear, x, weight_ED, scales, out_TE)
                entries.append(_entry("minidsa by hand", run, check))
            entries += _library_entries(peers, x, weight_ED, scales, check)
            floor = floor_us(
                rows * columns + tokens * (columns + 2 * rows), 2.0 * tokens * rows * columns, "fp8"
            )
            yield Case("fp8 product", f"{tokens} x {columns} to {rows}", floor, entries)


def _entry(name: str, run: Callable[[], Tensor], check: Callable[[Tensor], str]) -> Entry:
    return Entry(name, run, lambda: check(run()))


def _check(out: Tensor, expected: Tensor) -> str:
    return closeness(out, expected, TOLERANCE)


def _library_entries(
    peers: Peers, x: Fp8Rows, weight_ED: Tensor, scales: Tensor, check: Callable[[Tensor], str]
) -> Iterator[Entry]:
    scales_TG = x.scales_GT.t()
    if len(x.values_TD) >= 64:
        kind: Any = F.ScalingType  # pyright: ignore[reportPrivateImportUsage]
        padded = torch.zeros(len(scales), -(-scales.shape[1] // 4) * 4, device=DEVICE)
        padded[:, : scales.shape[1]] = scales
        inputs = (scales_TG, kind.BlockWise1x128, padded.t(), kind.BlockWise128x128)
        library: Any = F.scaled_mm
        run = partial(library, x.values_TD, weight_ED.t(), *inputs, output_dtype=BF16)
        yield _entry("torch scaled_mm", run, check)
    if peers.deep_gemm is not None:
        out_TE = torch.empty(len(x.values_TD), len(weight_ED), dtype=BF16, device=DEVICE)
        deep: Any = peers.deep_gemm

        def run_deep() -> Tensor:
            inputs = ((x.values_TD, scales_TG), (weight_ED, scales), out_TE)
            deep.fp8_gemm_nt(*inputs, disable_ue8m0_cast=True)
            return out_TE

        yield _entry("DeepGEMM", run_deep, check)


def grouped(peers: Peers, quick: bool) -> Iterator[Case]:
    """64 experts' gate and up, as many rows for each."""
    rows, columns = 4096, 7168
    weights = Fp8Weights(*random_weight(EXPERTS, rows, columns))
    for each in (4, 128) if quick else (4, 32, 128, 512):
        x_TD = torch.randn(EXPERTS * each, columns, device=DEVICE, dtype=BF16)
        x = quantise_rows(x_TD)
        ids_T1 = torch.arange(EXPERTS, device=DEVICE).repeat_interleave(each).unsqueeze(1)
        out_PE = torch.empty(len(x_TD), rows, dtype=BF16, device=DEVICE)
        last = dequantise(weights.values_XED[-1], weights.scales_XBB[-1])
        expected = quantised(x_TD[-each:]) @ last.t()

        def check(out: Tensor, expected: Tensor = expected, each: int = each) -> str:
            return closeness(out[-each:], expected, TOLERANCE)

        entries = []
        for tiling in tilings(each):
            groups = group_pairs(ids_T1, EXPERTS, tiling.rows)
            run = partial(grouped_product, x, weights, groups, 1, tiling, out_PE)
            entries.append(_entry(named(tiling), run, check))
        if each > 32:
            groups = group_pairs(ids_T1, EXPERTS, 128)

            def by_hand(x: Fp8Rows = x, groups: Groups = groups, out: Tensor = out_PE) -> Tensor:
                hopper_experts(x, weights, groups, 1, out)
                return out

            entries.append(_entry("minidsa by hand", by_hand, check))
        entries += _grouped_peer(peers, x, weights, each, check)
        floor = floor_us(
            EXPERTS * rows * columns + len(x_TD) * (columns + 2 * rows),
            2.0 * len(x_TD) * rows * columns,
            "fp8",
        )
        yield Case("fp8 grouped", f"{EXPERTS} x {each} x {columns} to {rows}", floor, entries)


def _grouped_peer(
    peers: Peers, x: Fp8Rows, weights: Fp8Weights, each: int, check: Callable[[Tensor], str]
) -> Iterator[Entry]:
    """DeepGEMM: batches padded to 64 rows for few rows, rows in one piece for many."""
    if peers.deep_gemm is None:
        return
    deep: Any = peers.deep_gemm
    count, (rows, columns) = len(x.values_TD), weights.values_XED.shape[1:]
    weight = (weights.values_XED, weights.scales_XBB)
    if each % 128 == 0:
        out_PE = torch.empty(count, rows, dtype=BF16, device=DEVICE)
        owner_P = torch.arange(EXPERTS, device=DEVICE).repeat_interleave(each).int()

        def run() -> Tensor:
            inputs = ((x.values_TD, x.scales_GT.t()), weight, out_PE, owner_P)
            deep.m_grouped_fp8_gemm_nt_contiguous(*inputs, disable_ue8m0_cast=True)
            return out_PE
    else:
        padded = quantise_rows(torch.randn(EXPERTS * 64, columns, device=DEVICE, dtype=BF16))
        values = padded.values_TD.view(EXPERTS, 64, columns)
        scales = padded.scales_GT.t().contiguous().view(EXPERTS, 64, -1)
        values[:, :each] = x.values_TD.view(EXPERTS, each, columns)
        scales[:, :each] = x.scales_GT.t().reshape(EXPERTS, each, -1)
        out_XRE = torch.empty(EXPERTS, 64, rows, dtype=BF16, device=DEVICE)
        counts_X = torch.full((EXPERTS,), each, dtype=torch.int32, device=DEVICE)

        def run() -> Tensor:
            inputs = ((values, scales), weight, out_XRE, counts_X, each)
            deep.m_grouped_fp8_gemm_nt_masked(*inputs, disable_ue8m0_cast=True)
            return out_XRE[:, :each].flatten(0, 1)

    yield _entry("DeepGEMM", run, check)


def experts(peers: Peers, quick: bool) -> Iterator[Case]:
    """A whole layer: 256 experts and a shared one, 8 of them chosen; no peer does it at once."""
    width, middle, count = 7168, 2048, 257
    gate_up = Fp8Weights(*random_weight(count, 2 * middle, width))
    down = Fp8Weights(*random_weight(count, width, middle))
    for tokens in (1, 64) if quick else (1, 16, 64, 4096):
        x_TD = torch.randn(tokens, width, device=DEVICE, dtype=BF16)
        ids_TK = torch.rand(tokens, count - 1, device=DEVICE).topk(8).indices
        ids_TK = F.pad(ids_TK, (0, 1), value=count - 1).contiguous()
        weights_TK = torch.rand(tokens, 9, device=DEVICE)
        run = partial(fp8_experts, x_TD, ids_TK, weights_TK, gate_up, down)

        def check(x_TD: Tensor = x_TD, ids=ids_TK, weights=weights_TK, run=run) -> str:
            some = slice(0, min(len(x_TD), 4))
            expected = reference_experts(x_TD[some], ids[some], weights[some], gate_up, down)
            return closeness(run()[some], expected, TWICE)

        read = len(ids_TK.unique()) * 3 * middle * width
        floor = floor_us(read, 6.0 * ids_TK.numel() * middle * width, "fp8")
        yield Case("experts", f"{tokens} tokens", floor, [Entry("minidsa", run, check)])


SECTIONS: dict[str, Section] = {"linear": linear, "grouped": grouped, "experts": experts}
