"""How tiles of sums leave `fp8_hopper`: as rows of the products, or as silu(gate) * up in fp8.

All of it is unrolled over the 64 numbers that each thread holds, and tensor cores wait: what counts
is how few instructions a number takes, down to the time to fetch them.
"""

# To a type checker a kernel's constants, layouts and ranges are objects of other types than the
# compiler makes of them.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any, cast

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...attention.kernels.fp8_rows import AMAX_FLOOR, FP8_MAX

_FLOOR = gl.constexpr(AMAX_FLOOR)
_LARGEST = gl.constexpr(FP8_MAX)
# Triton 3.7 renamed it.
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
# To a type checker a kernel is anything, as in `launch`.
_jit = cast(Any, gluon.jit)


@_jit
def store_rows(
    out_ptr, order_ptr, acc_a, acc_b, room, first, last, first_e, eighths, KIND: gl.constexpr
):
    """Two times 128 columns of the products, turned in shared memory into whole rows."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    place = first + gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows))
    is_row = gl.expand_dims(place < last, 1)
    target = place
    if KIND == "back":
        target = gl.load(order_ptr + place, mask=place < last, other=0)
    e = first_e + gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows))
    row = out_ptr + gl.expand_dims(target.to(gl.int64) * eighths * 8, 1)
    for second in gl.static_range(2):
        # The rows before have been read.
        _barrier()
        room.store((acc_b if second else acc_a).to(out_ptr.dtype.element_ty))
        _barrier()
        values = room.load(of_rows)
        column = gl.expand_dims(e + second * 128, 0)
        gl.store(row + column, values, mask=is_row & (column < eighths * 8))


@_jit
def _rounded(x):
    """x as bf16 would keep it: two numbers at once, as converting them one by one is slow."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2;"
        "shl.b32 $0, both, 16; and.b32 $1, both, 0xFFFF0000;}",
        "=r,=r,r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@_jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) without the cases of huge and tiny numbers, which end at 0 or 1 anyway."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;}",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@_jit
def store_silu_product(out_ptr, scale_ptr, gate, up, room, first, last, tile_e, eighths, places):
    """silu(gate) * up of 128 columns in fp8, as `fp8_rows` makes it of what is rounded to bf16.

    A unit in the last place of silu(gate) may differ; converting to fp8 saturates."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
    gate = _rounded(gate)
    rows = gate * _sigmoid(gate) * _rounded(up)
    scale = gl.div_rn(gl.maximum(gl.max(gl.abs(rows), 1), _FLOOR), _LARGEST)
    rows = (rows * gl.expand_dims(gl.div_rn(1.0, scale), 1)).to(gl.float8e4nv)
    place = first + gl.arange(0, 64, layout=of_row)
    gl.store(scale_ptr + tile_e.to(gl.int64) * places + place, scale, mask=place < last)
    _barrier()
    room.store(rows)
    _barrier()
    values = room.load(of_rows)
    place = first + gl.arange(0, 64, layout=gl.SliceLayout(1, of_rows))
    e = tile_e * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, of_rows))
    row = gl.expand_dims(place.to(gl.int64) * eighths * 4, 1)
    gl.store(out_ptr + row + gl.expand_dims(e, 0), values, mask=gl.expand_dims(place < last, 1))
