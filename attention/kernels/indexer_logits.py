"""The lightning indexer's scores over paged index rows: prefill, decode and verify alike.

    out[t, l] = scale_l * sum_n w[t, n] * relu(q[t, n] . k_l)        for l < visible[t]

q and k are e4m3, or both the model's dtype and then without scales; the products are summed in fp32
by the tensor cores; the ReLU is per head and before the weighted sum (DeepSeek-V3.2-Exp, section
2.1). w carries all that is constant for a head: the scale of its fp8 query, n^-0.5 and D^-0.5.

The keys are the rows of a matrix product and the heads of a few neighbouring queries its columns,
so that a key that was read serves all of them, and that a thread sums most heads by itself. A
program takes one group of queries of one request and a run of its pages.

Floors on an H200: prefill 16,384 FLOP a (query, key) pair at 1979 TFLOP/s, 1.04 ms for 4096
queries over 32k keys; decode 132 bytes read and 4 written a pair, 133 us for 128 requests of 32k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .fp8_rows import IndexPages, PlainIndexPages
from .launch import ceil_div, jit, power_of_two

# Depth of the pipeline, page numbers included: four pages of fp8 keys are under way, two others.
STAGES, STAGES_PLAIN = 7, 4

# Columns of the matrix product, the most a Hopper tensor core instruction takes.
COLUMNS = 256


@dataclass(frozen=True)
class QueryGroups:
    """Neighbouring queries of one request, at most `size` together.

    bounds_G1: int32 [G + 1], where each group's tokens begin, and the end. request_G: int32.
    """

    bounds_G1: Tensor
    request_G: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.request_G)


def group_size(longest: int, heads: int) -> int:
    """Queries of a group where requests bring at most `longest` tokens: a power of two."""
    return max(1, min(COLUMNS // heads, power_of_two(longest)))


def query_groups(
    query_lens: Sequence[int], heads: int, device: torch.device, *, first_request: int = 0
) -> QueryGroups:
    """Cut the tokens of neighbouring requests into groups; `query_lens` counts those of each."""
    size = group_size(max(query_lens, default=1), heads)
    bounds, requests, token = [], [], 0
    for request, length in enumerate(query_lens):
        bounds += range(token, token + length, size)
        requests += [first_request + request] * ceil_div(length, size)
        token += length
    return QueryGroups(
        torch.tensor([*bounds, token], dtype=torch.int32, device=device),
        torch.tensor(requests, dtype=torch.int32, device=device),
        size,
    )


def indexer_logits(
    q_TnD: Tensor,
    weights_Tn: Tensor,
    pages: IndexPages | PlainIndexPages,
    table_BP: Tensor,
    groups: QueryGroups,
    visible_T: Tensor,
    out_TL: Tensor,
) -> Tensor:
    """Fill out_TL[t, :visible_T[t]]; nothing else of it is written. Returns it.

    q_TnD: the dtype of the pages' values (float8_e4m3fn where they are fp8), contiguous; n and D
    powers of two of at least 16, n at most 256. weights_Tn: fp32.
    table_BP: int32 pages of each request. groups: of these T tokens. visible_T: int32, 0 or less
    for padding. out_TL: fp32; L, the columns, bounds every visible length. Pages behind a group's
    longest visible length are not read; the rest of its last page is, and does not matter.
    """
    heads, width = q_TnD.shape[1:]
    if not out_TL.numel():
        return out_TL
    num_pages = ceil_div(out_TL.shape[1], pages.page_size)
    run = pages_of_a_program(len(groups), num_pages)
    scales_NP = pages.scales_NP
    _logits[(len(groups), ceil_div(num_pages, run))](
        q_TnD,
        weights_Tn,
        TensorDescriptor.from_tensor(pages.values_NPD, [1, pages.page_size, width]),
        scales_NP,
        table_BP,
        groups.bounds_G1,
        groups.request_G,
        visible_T,
        out_TL,
        scales_NP.stride(0) if scales_NP is not None else 0,
        table_BP.stride(0),
        out_TL.stride(0),
        RUN=run,
        PAGE=pages.page_size,
        HEADS=heads,
        WIDTH=width,
        QUERIES=groups.size,
        STAGES=STAGES if scales_NP is not None else STAGES_PLAIN,
        num_warps=4,
    )
    return out_TL


def pages_of_a_program(groups: int, num_pages: int) -> int:
    """Pages a program reads one after the other: a power of two, 8 to 64.

    Long enough that fetching the queries does not count, short enough for some 24 programs for each
    of 132 multiprocessors, so that the last ones to end leave few idle.
    """
    wanted = groups * num_pages // (24 * 132)
    return min(64, max(8, power_of_two(wanted + 1) // 2))


@jit
def _logits(
    q_ptr,
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
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (g, c): the queries of group g against pages c * RUN ... of its request."""
    group = tl.program_id(0)
    first = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    queries = first + tl.arange(0, QUERIES)
    visible = tl.load(visible_ptr + queries, mask=queries < end, other=0)
    begin = tl.program_id(1) * RUN
    count = tl.minimum(tl.cdiv(tl.max(visible), PAGE) - begin, RUN)
    if count <= 0:
        return

    table_ptr += tl.load(request_ptr + group).to(tl.int64) * table_stride + begin
    rows = first.to(tl.int64) * HEADS + tl.arange(0, QUERIES * HEADS)
    own = tl.arange(0, QUERIES * HEADS) < (end - first) * HEADS
    q = tl.load(
        q_ptr + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=own[:, None], other=0.0
    )
    weights = tl.load(weights_ptr + rows, mask=own, other=0.0)
    offsets = tl.arange(0, PAGE)
    out_ptrs = out_ptr + queries.to(tl.int64)[None, :] * out_stride + offsets[:, None]
    scale = _scales(scales_ptr, tl.load(table_ptr), scale_stride, PAGE)
    for i in tl.range(0, count, num_stages=STAGES):
        # The next page's scales are fetched a turn ahead; the values, further, by the compiler.
        following = tl.load(table_ptr + tl.minimum(i + 1, count - 1))
        next_scale = _scales(scales_ptr, following, scale_stride, PAGE)
        keys = values.load([tl.load(table_ptr + i), 0, 0]).reshape(PAGE, WIDTH)
        products = tl.dot(keys, q.T)
        terms = tl.maximum(products, 0.0) * weights[None, :]
        scores = tl.sum(tl.reshape(terms, (PAGE, QUERIES, HEADS)), axis=2)
        if scales_ptr is not None:
            scores *= scale[:, None]
        places = (begin + i) * PAGE + offsets
        tl.store(out_ptrs + (begin + i) * PAGE, scores, mask=places[:, None] < visible[None, :])
        scale = next_scale


@jit
def _scales(scales_ptr, page, scale_stride, PAGE: tl.constexpr):
    """Scales of a page's keys; ones where keys have none."""
    scale = tl.full((PAGE,), 1.0, tl.float32)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + page.to(tl.int64) * scale_stride + tl.arange(0, PAGE))
    return scale
