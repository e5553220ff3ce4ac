"""Dense latent attention of decode and verify steps over the paged cache, by parts of the keys.

    out[b, j, h] = sum_i softmax_i(q[b, j, h] . row[i]) * latent(row[i]),  i < kv_len[b] - w + j + 1

A request brings w queries (tokens) of H heads each, all against the same rows, so its w * H query
rows are one matrix: a program takes a block of them and a part of the request's keys. What goes on
in a tile is told in `online_softmax.py` and `latent_rows.py`.

Read past the mask: nothing. Keys behind a request's end are never read, nor the padding of its row
in the block table. Called by `dense.triton`; the twin is `reference.sparse_attention` over all
slots of a request.

Floor on one H200 (4.3 TB/s, 790 TFLOP/s in bf16), N keys, C + R = 576, C = 512: bytes N * 1152 a
request, operations 2 * w * H * N * 1088. At 128 heads and w = 1 bound by arithmetic (128 requests
of 32768: 1.48 ms), at 16 heads by memory (128 of 8192: 281 us).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton.language as tl
from torch import Tensor

from . import few_heads, latent_hopper
from .fp8_rows import BLOCK
from .latent_rows import RAISE, Queries, Rows, group_width, load_columns, load_rows
from .launch import Tiling, ceil_div, jit, multiprocessors, power_of_two
from .online_softmax import add_values, combine, log_sum_exp, scores_of, weigh
from .splits import Processors


@jit
def _attend_pages(
    q_ptr,
    q_rope_ptr,
    latent_ptr,
    rope_ptr,
    scale_ptr,
    pages_ptr,
    lengths_ptr,
    parts_ptr,
    out_ptr,
    lse_ptr,
    rows,
    heads,
    stride_q,
    stride_q_rope,
    stride_rows,
    stride_pages,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Blocks of rows that read the same keys are neighbours, for the L2 cache.
    row_blocks = tl.cdiv(rows, BLOCK_M)
    part = (tl.program_id(0) // row_blocks).to(tl.int64)
    m = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    # A place without a part has first = last = 0.
    request = tl.load(parts_ptr + part * 3)
    first = tl.load(parts_ptr + part * 3 + 1)
    last = tl.load(parts_ptr + part * 3 + 2)
    is_row = (m < rows) & (request >= 0)
    request = tl.maximum(request, 0).to(tl.int64)
    # The row of query j sees the keys before kv_len - w + j + 1, and rows = w * heads.
    visible = tl.load(lengths_ptr + request) - rows // heads + m // heads + 1

    place = request * rows + m
    q = load_columns(q_ptr + place[:, None] * stride_q, is_row[:, None], 0, C, GROUP)
    q_rope = load_columns(
        q_rope_ptr + place[:, None] * stride_q_rope, is_row[:, None], 0, R, BLOCK_R
    )
    acc = ()
    for _ in tl.static_range((C + GROUP - 1) // GROUP):
        acc = acc + (tl.zeros((BLOCK_M, GROUP), tl.float32),)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = begin + tl.arange(0, BLOCK_N)
        inside = n < last
        page = tl.load(pages_ptr + request * stride_pages + n // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + n % PAGE
        latent, rope = load_rows(
            latent_ptr, rope_ptr, scale_ptr, slot, stride_rows, inside,
            UNIT, C, R, GROUP, BLOCK_R, FP8,
        )  # fmt: skip
        scores = scores_of(q, latent, q_rope, rope, rows > 0, BLOCK_M == 64)
        seen = inside[None, :] & (n[None, :] < visible[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, largest, total = weigh(scores, largest, total)
        acc = add_values(weights.to(latent[0].dtype), shrink, latent, acc)

    lse, divisor = log_sum_exp(largest, total)
    place = part * rows + m
    tl.store(lse_ptr + place, lse, mask=is_row)
    if FP8:
        divisor = divisor * RAISE
    for g in tl.static_range(len(acc)):
        c = g * GROUP + tl.arange(0, GROUP)[None, :]
        out = (acc[g] / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place[:, None] * C + c, out, mask=is_row[:, None] & (c < C))


def decode_tiling(rows: int, rows_SX: Tensor, latent_width: int) -> Tiling:
    """For requests of so many query rows over these cached rows: the fastest on an H200 of what
    compiles without spills. Of fp8 rows no time was taken."""
    is_fp8 = rows_SX.dtype == torch.uint8
    if latent_hopper.suits(rows_SX, latent_width):
        few = rows <= 32
        return few_heads.tiling(rows, is_fp8, 0) if few else latent_hopper.TILING
    if rows > 32:
        return Tiling(64, 64, BLOCK, 8, 3, 1) if is_fp8 else Tiling(64, 64, 256, 8, 2, 1)
    if rows > 16:
        return Tiling(32, 32, BLOCK, 8, 3, 1) if is_fp8 else Tiling(32, 64, 512, 8, 3, 1)
    return Tiling(16, 64, BLOCK, 8, 3, 1) if is_fp8 else Tiling(16, 32, 512, 4, 3, 2)


@dataclass
class DecodeParts:
    """Which program works on which keys, for requests of these lengths; refreshed in place.

    parts_W3: int32, request (-1: nothing to do), first key, one behind the last key. first_B:
    int32, the first part of each request and one behind the last. lengths_B: int32 kv lengths.
    """

    rows: int
    tiling: Tiling
    processors: Processors
    parts_W3: Tensor
    first_B: Tensor
    lengths_B: Tensor

    @classmethod
    def of(
        cls,
        kv_lens: Sequence[int],
        rows: int,
        tiling: Tiling,
        device: torch.device,
        processors: int | None = None,
    ) -> Self:
        """rows: query rows (tokens times heads) of each request; tiling: see `decode_tiling`.

        processors: multiprocessors to share the work among; None: those of the device.
        """
        at_once = (processors or multiprocessors(device)) * tiling.programs
        shared = Processors(at_once, ceil_div(rows, tiling.rows), tiling.keys)
        parts, first = _cut(kv_lens, shared, None)
        made = [torch.tensor(x, dtype=torch.int32, device=device) for x in (parts, first, kv_lens)]
        return cls(rows, tiling, shared, *made)

    def refresh(self, kv_lens: Sequence[int]) -> None:
        """Take other lengths of as many requests; no more parts than there were at first."""
        capacity = len(self.parts_W3)
        parts, first = _cut(kv_lens, self.processors, capacity)
        parts += [(-1, 0, 0)] * (capacity - len(parts))
        for tensor, values in (
            (self.parts_W3, parts),
            (self.first_B, first),
            (self.lengths_B, kv_lens),
        ):
            tensor.copy_(torch.tensor(values, dtype=torch.int32), non_blocking=True)


def _cut(
    kv_lens: Sequence[int], processors: Processors, most_parts: int | None
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Parts (request, first key, one behind the last) and where those of each request begin.

    A request without keys keeps one part, which writes its zeros.
    """
    tiles = Counter(max(1, ceil_div(length, processors.tile)) for length in kv_lens)
    step = processors.tiles_per_part(tiles, most_parts) * processors.tile
    parts: list[tuple[int, int, int]] = []
    first = [0]
    for request, length in enumerate(kv_lens):
        parts += [(request, i, min(i + step, length)) for i in range(0, max(length, 1), step)]
        first.append(len(parts))
    return parts, first


def mla_decode(
    q_THX: Tensor,
    rows_SX: Tensor,
    block_table_BP: Tensor,
    page_size: int,
    parts: DecodeParts,
    latent_width: int,
) -> tuple[Tensor, Tensor]:
    """Attended latents [B * w, H, C] in the queries' dtype and their natural LSE, fp32 [B * w, H].

    q_THX: absorbed queries with the scale folded in, contiguous, w of each request in order; X =
    C + R. rows_SX: one layer's rows as in `sparse_mla`. block_table_BP: int32. A query that sees
    nothing (a padding request's) gives zeros and -inf, and may be NaN itself.
    Raises ValueError or TypeError for other shapes and dtypes.
    """
    tokens, heads, width = q_THX.shape
    if rows_SX.dtype not in (torch.uint8, q_THX.dtype):
        raise TypeError(f"the queries are {q_THX.dtype}, the cached rows {rows_SX.dtype}")
    if len(block_table_BP) * parts.rows != tokens * heads or not q_THX.is_contiguous():
        raise ValueError(
            f"{len(block_table_BP)} requests of {parts.rows} rows need that many contiguous rows "
            f"of queries, got {tokens} tokens of {heads} heads"
        )
    rows = Rows.of(rows_SX, latent_width, width - latent_width)
    tiling = parts.tiling
    q = Queries.of(q_THX, latent_width, rows.is_fp8 and not tiling.by_hand)
    out_THC = q_THX.new_empty(tokens, heads, latent_width)
    lse_TH = q_THX.new_empty(tokens, heads, dtype=torch.float32)
    num_parts = len(parts.parts_W3)
    # With one part a request, part and request are the same number.
    is_split = num_parts > len(block_table_BP)
    part_WMC, part_lse_WM = out_THC, lse_TH
    if is_split:
        part_WMC = lse_TH.new_empty(num_parts, parts.rows, latent_width)
        part_lse_WM = lse_TH.new_empty(num_parts, parts.rows)
    if not tokens:
        return out_THC, lse_TH
    work = (rows, block_table_BP, page_size)
    outputs = (part_WMC, part_lse_WM)
    if tiling.by_hand and tiling.rows <= 32:
        plan = (parts.lengths_B, parts.parts_W3)
        few_heads.attend_pages(q_THX, *work, *plan, *outputs, tiling)
    elif tiling.by_hand:
        latent_hopper.attend_pages(q, *work, parts.lengths_B, parts.parts_W3, *outputs)
    else:
        _launch(q, *work, parts, *outputs)
    if is_split:
        shape = (len(block_table_BP), parts.rows)
        combine(
            part_WMC,
            part_lse_WM,
            parts.first_B,
            out_THC.view(*shape, latent_width),
            lse_TH.view(shape),
        )
    return out_THC, lse_TH


def _launch(
    q: Queries, rows: Rows, block_table_BP: Tensor, page_size: int, parts: DecodeParts,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    tiling, latent_width, rope_width = parts.tiling, q.latent.shape[2], q.rope.shape[2]
    _attend_pages[(len(parts.parts_W3) * ceil_div(parts.rows, tiling.rows),)](
        q.latent,
        q.rope,
        rows.latent_SC,
        rows.rope_SR,
        rows.scales_SG,
        block_table_BP,
        parts.lengths_B,
        parts.parts_W3,
        out,
        lse,
        parts.rows,
        q.latent.shape[1],
        q.latent.stride(1),
        q.rope.stride(1),
        rows.stride,
        block_table_BP.stride(0),
        page_size,
        rows.unit,
        latent_width,
        rope_width,
        group_width(latent_width, tiling.group),
        max(16, power_of_two(rope_width)),
        tiling.rows,
        tiling.keys,
        rows.is_fp8,
        tiling.num_stages,
        num_warps=tiling.num_warps,
    )
