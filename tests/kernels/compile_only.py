"""Compiles kernels for a Hopper GPU where there is none, through the functions that launch them.

    python tests/kernels/compile_only.py

Triton gets a driver that names compute capability 9.0, "loads" what was compiled and launches
nothing, so that CPU tensors do. What the interpreter lets pass (types that change within a branch,
shapes that tensor cores do not have, too much shared memory) fails here. Prints a line for each
kernel: shared memory in bytes.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from minidsa.attention.kernels import indexer_logits_hopper, latent_hopper, topk_triton
from minidsa.attention.kernels.cache_write import (
    IndexWrite,
    LatentWrite,
    quantise_index_queries,
    write_rows,
)
from minidsa.attention.kernels.fp8_rows import (
    FP8,
    PlainIndexPages,
    new_fp8_latent_rows,
    new_index_pages,
)
from minidsa.attention.kernels.indexer_logits import indexer_logits, query_groups
from minidsa.attention.kernels.mla_decode import DecodeParts, decode_tiling, mla_decode
from minidsa.attention.kernels.sparse_mla import sparse_mla, sparse_tiling
from minidsa.attention.kernels.topk_triton import PagedSlots, select_top_k
from minidsa.model.fp8 import Fp8Weights
from minidsa.model.kernels.expert_groups import Groups
from minidsa.model.kernels.fp8_hopper import hopper_experts, hopper_linear
from minidsa.model.kernels.fp8_rows import Fp8Rows

CPU = torch.device("cpu")
SHARED_MEMORY = 227 * 1024


class CompileOnly:
    """As much of a driver as compiling takes."""

    def __init__(self) -> None:
        self.utils = types.SimpleNamespace(
            load_binary=self._load,
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY},
            fill_tma_descriptor=lambda *args: None,
        )

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        print(f"{name}: {shared} bytes of shared memory")
        return 0, 0, 0, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *args: None


def compile_attention() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        compile_latents(64, torch.zeros(64, 576, dtype=dtype), dtype)
    fp8_SX = new_fp8_latent_rows(64, 512, 64, CPU).rows_SX
    for heads in (16, 32, 64):
        compile_latents(heads, fp8_SX, torch.bfloat16)
    for heads in (16, 32):
        compile_latents(heads, torch.zeros(64, 576, dtype=torch.bfloat16), torch.bfloat16)


def compile_latents(heads: int, rows_SX: torch.Tensor, dtype: torch.dtype) -> None:
    table, q_THX = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, heads, 576, dtype=dtype)
    slots = torch.zeros(2, 2048, dtype=torch.int32)
    for num_parts in (1, 2):
        sparse_mla(q_THX, rows_SX, slots, slots[:, 0], 512, num_parts=num_parts)
        many = sparse_tiling(99, heads, rows_SX, 512)
        sparse_mla(q_THX, rows_SX, slots, slots[:, 0], 512, num_parts=num_parts, tiling=many)
        tiling = decode_tiling(heads, rows_SX, 512)
        parts = DecodeParts.of([200 * num_parts] * 2, heads, tiling, CPU, num_parts)
        mla_decode(q_THX, rows_SX, table, 64, parts, 512)


def compile_index_scores() -> None:
    pages, table = new_index_pages(3, 64, 128, CPU), torch.zeros(1, 2, dtype=torch.int32)
    plain = PlainIndexPages(torch.zeros(3, 64, 128, dtype=torch.bfloat16))
    table = table[:, :1]
    for heads, tokens in ((64, 1), (64, 2), (64, 9), (32, 1), (32, 9)):
        groups = query_groups([tokens], heads, CPU)
        out, visible = torch.zeros(tokens, 128), torch.ones(tokens, dtype=torch.int32)
        q, weights = torch.zeros(tokens, heads, 128), torch.zeros(tokens, heads)
        indexer_logits(q.to(FP8), weights, pages, table, groups, visible, out)
        indexer_logits(q.bfloat16(), weights, plain, table, groups, visible, out)
        if groups.size * heads == 256:
            inputs = (q.to(FP8), weights, pages, table, groups, visible, out)
            indexer_logits_hopper.indexer_logits_hopper(*inputs)


def compile_top_k() -> None:
    slots = PagedSlots(
        torch.zeros(2, 9, dtype=torch.int32), torch.zeros(128, dtype=torch.int32), 64
    )
    for rows, length in ((2, 500), (2, 8192), (2, 32768), (128, 40_000), (2, 300_000)):
        scores, visible = torch.zeros(rows, length), torch.ones(rows, dtype=torch.int32)
        select_top_k(scores, visible, 2048, slots=slots)
        select_top_k(scores[:, :-1], visible, 512)
    # Sizes of 1 are constants to the compiler.
    select_top_k(torch.zeros(200, 1), torch.ones(200, dtype=torch.int32), 1, slots=slots)


def compile_cache_writes() -> None:
    x, weight = torch.zeros(2, 704, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    angles, slots = torch.zeros(2, 32, dtype=torch.complex64), torch.zeros(2, dtype=torch.int64)
    norm = torch.zeros(2, 128)
    fp8 = IndexWrite(norm[0], norm[1], new_index_pages(1, 64, 128, CPU))
    plain = IndexWrite(norm[0], norm[1], torch.zeros(64, 128, dtype=torch.bfloat16))
    rows = LatentWrite(weight, new_fp8_latent_rows(64, 512, 64, CPU))
    for power_of_two in (False, True):
        write_rows(x, angles, slots, rows, fp8, power_of_two=power_of_two)
    latent = LatentWrite(weight, torch.zeros(64, 576, dtype=torch.bfloat16))
    write_rows(x, angles, slots, latent, plain)
    write_rows(x, angles, slots, latent, None)
    q = torch.zeros(2, 64, 128, dtype=torch.bfloat16)
    quantise_index_queries(q, torch.zeros(2, 64), angles)
    quantise_index_queries(q, torch.zeros(2, 64), None)


def compile_products() -> None:
    x, dtype = Fp8Rows.empty(9, 512, CPU), torch.bfloat16
    weights = Fp8Weights.empty(3, 256, 512, CPU)
    hopper_linear(x, weights.values_XED[0], weights.scales_XBB[0], torch.zeros(9, 256, dtype=dtype))
    groups = Groups(
        torch.zeros(18, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32), tile_rows=128
    )
    hopper_experts(x, weights, groups, 2, torch.zeros(18, 256, dtype=dtype))
    hopper_experts(x, weights, groups, 2, Fp8Rows.empty(18, 128, CPU))


def main() -> None:
    driver: Any = CompileOnly()
    triton.runtime.driver.set_active(driver)
    # What kernels are made for cannot be asked of a CPU tensor.
    indexer_logits_hopper.suits = lambda *args: True
    latent_hopper.suits = lambda *args: True
    topk_triton.takes_assembly = lambda device: True
    for compile_kernels in (
        compile_attention,
        compile_index_scores,
        compile_top_k,
        compile_cache_writes,
        compile_products,
    ):
        compile_kernels()


if __name__ == "__main__":
    main()
