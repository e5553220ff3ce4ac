"""Rotary positions: a table of unit complex numbers and a rotation in place.

In memory a rotated pair is always (2i, 2i+1), so a rotation is one complex product. Checkpoints
whose pairs are (i, i + width/2) get their rows reordered once, at load (`half_split_rows`): q and k
alike, so every q.k is unchanged. Cached rows hold interleaved pairs too.
"""

import math

import torch
from torch import Tensor

from ..rope_config import RopeConfig, YarnConfig
from .elementwise import by_rows


def half_split_rows(width: int, rotated: int, start: int = 0) -> list[int]:
    """Where each row of a half-split projection comes from once its pairs are adjacent.

    Rows start..start+rotated-1 of `width` are rotated, the others stay in place.
    """
    half = rotated // 2
    pairs = [start + i + offset for i in range(half) for offset in (0, half)]
    return [*range(start), *pairs, *range(start + rotated, width)]


def angle_table(rope: RopeConfig, width: int, positions: int, device: torch.device) -> Tensor:
    """e^(i * position * frequency) * rotation scale: complex64 [positions, width / 2]."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / rope.theta**exponents
    scale = 1.0
    if rope.yarn is not None:
        frequencies = _yarn_frequencies(frequencies, rope.theta, rope.yarn)
        scale = rope.yarn.rotation_scale
    steps = torch.arange(positions, dtype=torch.float32, device=device)
    angles = steps.unsqueeze(1) * frequencies.to(device)
    return torch.polar(torch.full_like(angles, scale), angles)


def _yarn_frequencies(frequencies: Tensor, theta: float, yarn: YarnConfig) -> Tensor:
    """Blend interpolated (f / factor) and original frequencies over a ramp between two dimensions.

    Dimensions that turn more than beta_fast times over the original context keep their frequency,
    those that turn less than beta_slow times are interpolated (arXiv 2309.00071, section 3.2).
    """
    width = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        ratio = yarn.original_context / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    index = torch.arange(len(frequencies), dtype=torch.float32)
    keep = 1 - ((index - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * (1 - keep) + frequencies * keep


def rotate_(x: Tensor, angles: Tensor) -> None:
    """Rotate [..., R] in place by complex angles that broadcast against [..., R / 2]."""
    if x.dtype == torch.float32:
        by_rows(Tensor.mul_, torch.view_as_complex(x.unflatten(-1, (-1, 2))), angles)
        return
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    x.copy_(torch.view_as_real(pairs * angles).flatten(-2))
