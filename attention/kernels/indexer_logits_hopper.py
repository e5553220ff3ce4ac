"""Index scores of prompts on Hopper: the work of `indexer_logits`, scheduled by hand.

A warpgroup multiplies the 64 keys of a page with 256 (query, head) columns in two halves. While
the tensor cores fill the second half's accumulator, ReLU, weights and the sum over heads run on the
first: at full rate a half takes the tensor cores 256 clocks and its epilogue about 150. Two
programs share a multiprocessor and fill each other's gaps. Pages come by the bulk copy engine,
STAGES ahead, straight out of the cache: a page of 64 rows of 128 bytes and 64 scales is 66 rows.
A key that was read serves the four queries of 64 heads, which halves what L2 must deliver against
two queries.
"""

from typing import Any, cast

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .fp8_rows import FP8, IndexPages, PlainIndexPages
from .indexer_logits import COLUMNS, QueryGroups, pages_of_a_program
from .launch import ceil_div

PAGE, WIDTH = 64, 128
STAGES = 4
# Pages between two moments at which the tensor cores have nothing of a program left to do. A loop
# that leaves products under way from turn to turn is serialised by the assembler.
UNROLL = 4
ROWS_OF_PAGE: gl.constexpr = gl.constexpr(66)
# Triton 3.7 renamed it.
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier  # pyright: ignore
# To a type checker a kernel is anything, as in `launch`.
_jit = cast(Any, gluon.jit)


def suits(q_TnD: Tensor, pages: IndexPages | PlainIndexPages, groups: QueryGroups) -> bool:
    """Whole groups of queries and fp8 pages of 64 x 128, on a GPU of compute capability 9."""
    _, heads, width = q_TnD.shape
    full = heads * groups.size == COLUMNS and heads <= COLUMNS // 2
    usual = (
        isinstance(pages, IndexPages)
        and pages.page_size == PAGE
        and width == WIDTH
        and pages.width == WIDTH
    )
    is_hopper = q_TnD.is_cuda and torch.cuda.get_device_capability(q_TnD.device)[0] == 9
    return full and usual and is_hopper


def indexer_logits_hopper(
    q_TnD: Tensor,
    weights_Tn: Tensor,
    pages: IndexPages | PlainIndexPages,
    table_BP: Tensor,
    groups: QueryGroups,
    visible_T: Tensor,
    out_TL: Tensor,
) -> Tensor:
    """As `indexer_logits`, where `suits` says so; ValueError elsewhere."""
    if isinstance(pages, PlainIndexPages) or not suits(q_TnD, pages, groups):
        raise ValueError(
            f"{tuple(q_TnD.shape)} queries in groups of {groups.size} over pages of "
            f"{pages.page_size} rows of {pages.width} on {q_TnD.device} need the portable kernel"
        )
    tokens, heads, _ = q_TnD.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    queries = q_TnD.view(tokens * heads, WIDTH)
    rows = pages.pages_NX.view(FP8).view(-1, WIDTH)
    num_pages = ceil_div(out_TL.shape[1], PAGE)
    run = pages_of_a_program(len(groups), num_pages)
    _logits[(len(groups), ceil_div(num_pages, run))](
        TensorDescriptor.from_tensor(queries, [COLUMNS // 2, WIDTH], layout),
        weights_Tn,
        TensorDescriptor.from_tensor(rows, [PAGE, WIDTH], layout),
        pages.scales_NP,
        table_BP,
        groups.bounds_G1,
        groups.request_G,
        visible_T,
        out_TL,
        pages.scales_NP.stride(0),
        table_BP.stride(0),
        out_TL.stride(0),
        RUN=run,
        HEADS=heads,
        STAGES=STAGES,
        UNROLL=UNROLL,
        num_warps=4,
    )
    return out_TL


@_jit
def _fetch(values, table_ptr, index, full, keys, STAGES: gl.constexpr, count):
    """Start copying page `index` of the run into its stage."""
    stage = index % STAGES
    inside = index < count
    page = gl.load(table_ptr + index, mask=inside, other=0)
    mbarrier.expect(full.index(stage), 64 * 128, pred=inside)
    tma.async_copy_global_to_shared(
        values, [page * ROWS_OF_PAGE, 0], full.index(stage), keys.index(stage), pred=inside
    )


@_jit
def _multiply(keys, q, mma: gl.constexpr):
    """Start the products of a page with half of the columns."""
    zeros = gl.zeros((64, 128), gl.float32, mma)  # pyright: ignore[reportCallIssue]
    return warpgroup_mma(keys, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@_jit
def _store(
    products,
    weights,
    scale,
    out_ptr,
    out_stride,
    first_key,
    visible,
    HEADS: gl.constexpr,
):
    """Epilogue of one half: the scores of 128 / HEADS queries for 64 keys.

    out_ptr, first_key and visible count from the run's first key and the half's first query.
    """
    QUERIES: gl.constexpr = 128 // HEADS
    terms = gl.maximum(products, 0.0) * gl.expand_dims(weights, 0)
    scores = gl.sum(gl.reshape(terms, (64, QUERIES, HEADS)), 2)
    layout: gl.constexpr = scores.type.layout
    keys = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    queries = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, layout))
    seen = gl.convert_layout(visible, gl.SliceLayout(0, layout))
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout))
    scores = scores * gl.expand_dims(scale, 1)
    rows = queries.to(gl.int64) * out_stride
    gl.store(
        out_ptr + gl.expand_dims(rows, 0) + gl.expand_dims(keys, 1),
        scores,
        mask=gl.expand_dims(keys, 1) < gl.expand_dims(seen, 0),
    )


@_jit
def _logits(
    queries_desc,
    weights_ptr,
    values,
    scales_ptr,
    table_ptr,
    bounds_ptr,
    request_ptr,
    visible_ptr,
    out_ptr,
    scale_stride,
    table_stride,
    out_stride,
    RUN: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
):
    """Program (g, c): the queries of group g against pages c * RUN ... of its request."""
    QUERIES: gl.constexpr = 128 // HEADS
    mma: gl.constexpr = gl.NVMMADistributedLayout(  # pyright: ignore
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    of_queries: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # pyright: ignore
    group = gl.program_id(0)
    first = gl.load(bounds_ptr + group)
    end = gl.load(bounds_ptr + group + 1)
    lower = first + gl.arange(0, QUERIES, layout=of_queries)
    visible_a = gl.load(visible_ptr + lower, mask=lower < end, other=0)
    visible_b = gl.load(visible_ptr + lower + QUERIES, mask=lower + QUERIES < end, other=0)
    begin = gl.program_id(1) * RUN
    longest = gl.maximum(gl.max(visible_a, 0), gl.max(visible_b, 0))
    count = gl.minimum((longest + 63) // 64 - begin, RUN)
    if count > 0:
        table_ptr += gl.load(request_ptr + group).to(gl.int64) * table_stride + begin
        keys = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], values.layout)
        q = gl.allocate_shared_memory(gl.float8e4nv, [2, 128, 128], queries_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES + 1):
            mbarrier.init(full.index(s), count=1)
        fence_async_shared()
        mbarrier.expect(full.index(STAGES), 2 * 128 * 128)
        for h in gl.static_range(2):
            tma.async_copy_global_to_shared(
                queries_desc, [first * HEADS + h * 128, 0], full.index(STAGES), q.index(h)
            )
        for s in gl.static_range(STAGES):
            _fetch(values, table_ptr, s, full, keys, STAGES, count)

        columns = gl.arange(0, 128, layout=gl.SliceLayout(0, mma))
        own = (end - first) * HEADS
        weights_ptr += first.to(gl.int64) * HEADS
        weights_a = gl.load(weights_ptr + columns, mask=columns < own, other=0.0)
        weights_b = gl.load(weights_ptr + 128 + columns, mask=columns + 128 < own, other=0.0)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        page = gl.load(table_ptr).to(gl.int64)
        scale = gl.load(scales_ptr + page * scale_stride + rows)
        out_a = out_ptr + first.to(gl.int64) * out_stride + begin * 64
        out_b = out_a + out_stride * QUERIES
        left_a = visible_a - begin * 64
        left_b = visible_b - begin * 64
        mbarrier.wait(full.index(STAGES), 0)
        for i in range(0, count, UNROLL):
            mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
            acc_a = _multiply(keys.index(i % STAGES), q.index(0), mma)
            acc_b = _multiply(keys.index(i % STAGES), q.index(1), mma)
            for u in gl.static_range(UNROLL):
                following = i + u + 1
                stage = following % STAGES
                page = gl.load(table_ptr + gl.minimum(following, count - 1)).to(gl.int64)
                next_scale = gl.load(scales_ptr + page * scale_stride + rows)
                key = (i + u) * 64
                done_a = warpgroup_mma_wait(num_outstanding=1, deps=(acc_a,))
                _store(done_a, weights_a, scale, out_a, out_stride, key, left_a, HEADS)
                if u + 1 < UNROLL:
                    is_there = following < count
                    mbarrier.wait(full.index(stage), (following // STAGES) & 1, pred=is_there)
                    acc_a = _multiply(keys.index(stage), q.index(0), mma)
                    done_b = warpgroup_mma_wait(num_outstanding=1, deps=(acc_b,))
                else:
                    done_b = warpgroup_mma_wait(num_outstanding=0, deps=(acc_b,))
                # Every warp is done with this page.
                _barrier()
                _fetch(values, table_ptr, i + u + STAGES, full, keys, STAGES, count)
                _store(done_b, weights_b, scale, out_b, out_stride, key, left_b, HEADS)
                if u + 1 < UNROLL:
                    acc_b = _multiply(keys.index(stage), q.index(1), mma)
                scale = next_scale
        for s in gl.static_range(STAGES + 1):
            mbarrier.invalidate(full.index(s))
