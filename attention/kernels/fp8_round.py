"""Rounding to e4m3 inside kernels, as `fp8_rows.quantise` does it.

Both divisions are rounded correctly: an approximate one would leave other bits than the twin.
"""

import triton.language as tl

from .fp8_rows import AMAX_FLOOR, FP8_MAX
from .launch import jit

_FLOOR = tl.constexpr(AMAX_FLOOR)
_LARGEST = tl.constexpr(FP8_MAX)


@jit
def fp8_scale(amax, POWER_OF_TWO: tl.constexpr):
    """The fp32 scale for numbers up to amax; POWER_OF_TWO: rounded up to one."""
    scale = tl.div_rn(tl.maximum(amax, _FLOOR), _LARGEST)
    if POWER_OF_TWO:
        # Up to the next power of two in the bits: exp2 and log2 are not exact everywhere.
        bits = scale.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFF) == 0, bits, (bits & 0x7F800000) + 0x800000)
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@jit
def to_fp8(rows, scale):
    """rows / scale in e4m3; scale is broadcast."""
    quotient = tl.div_rn(rows, scale)
    return tl.minimum(tl.maximum(quotient, -_LARGEST), _LARGEST).to(tl.float8e4nv)
