"""Latent attention of at most 32 query rows on Hopper: the work of `sparse_mla` and `mla_decode`.

Tensor cores multiply 64 rows at a time: with queries as rows, 16 heads leave three quarters of each
product empty. Here the keys are the rows, and the products are transposed:

    S^T[keys, H] = K[keys, 576] Q^T,    O^T[512, H] += V^T[512, keys] P^T[keys, H]

with H the query rows, padded to 16 or 32. Rows of 16-bit elements are copied to shared memory in
the background (`few_heads_hopper.py`), rows in fp8 come through registers, where they are converted
(`few_heads_fp8_hopper.py`).

Read past the mask: nothing, but for slots behind the count, which are in the list all the same.
The floors are told in `sparse_mla.py` and `mla_decode.py`.
"""

from typing import Any

from torch import Tensor

from .few_heads_fp8_hopper import attend_fp8
from .few_heads_hopper import attend
from .latent_rows import Rows
from .launch import Tiling, ceil_div

# Tiles of a program from which on fp8 rows are asked for ahead. With 8 tiles each (64 lists of 2048
# slots) that took 54 instead of 58 us with 16 heads and 65 instead of 76 with 32; with one, where
# nothing follows, it costs up to 1 us (H200).
ASK_FROM = 4


def tiling(query_rows: int, is_fp8: bool, lists: int) -> Tiling:
    """For so many query rows, at most 32, over rows that suit `latent_hopper`.

    lists: queries with slots of their own; 0: by pages, of which no time was taken over fp8 rows.
    Over those, 64 lists of 2048 slots took 16 heads 54 us in programs of four warps, two on a
    multiprocessor, and 57 us in programs of eight; 8 lists 19 us and 17 us (H200).
    """
    padded = 16 if query_rows <= 16 else 32
    if not is_fp8:
        return Tiling(padded, 64, 128, 4, 2, 1, by_hand=True)
    if padded == 16 and lists > 16:
        return Tiling(16, 64, 128, 4, 1, 2, by_hand=True)
    return Tiling(padded, 128, 128, 8, 1, 1, by_hand=True)


def attend_slots(
    q_THX: Tensor, rows: Rows, slots_TK: Tensor, counts_T: Tensor, out: Tensor, lse: Tensor,
    parts: int, tiling: Tiling,
) -> None:  # fmt: skip
    """As the kernel of `sparse_mla`: `parts` programs share a query's slots."""
    tokens, heads, _ = q_THX.shape
    columns = slots_TK.shape[1]
    tiles = ceil_div(ceil_div(columns, tiling.keys), parts)
    options = {"ASK": tiles >= ASK_FROM} if rows.is_fp8 else {}
    _kernel(rows)[(tokens * parts,)](
        q_THX, rows.latent_SC, rows.rope_SR, rows.scales_SG, slots_TK, counts_T, counts_T, out, lse,
        heads, heads, columns, parts, tiles * tiling.keys, rows.stride, slots_TK.stride(0),
        H=tiling.rows, PAGE=0, num_warps=tiling.num_warps, **options,
    )  # fmt: skip


def attend_pages(
    q_THX: Tensor, rows: Rows, table_BP: Tensor, page_size: int, lengths_B: Tensor,
    parts_W3: Tensor, out: Tensor, lse: Tensor, tiling: Tiling,
) -> None:  # fmt: skip
    """As the kernel of `mla_decode`."""
    tokens, heads, _ = q_THX.shape
    query_rows = tokens // len(table_BP) * heads
    _kernel(rows)[(len(parts_W3),)](
        q_THX, rows.latent_SC, rows.rope_SR, rows.scales_SG, table_BP, lengths_B, parts_W3, out,
        lse, query_rows, heads, 0, 0, 0, rows.stride, table_BP.stride(0),
        H=tiling.rows, PAGE=page_size, num_warps=tiling.num_warps,
    )  # fmt: skip


def _kernel(rows: Rows) -> Any:
    return attend_fp8 if rows.is_fp8 else attend
