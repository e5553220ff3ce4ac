"""What tests of kernels share: where they run, outputs full of NaN, rows in fp8.

Without a GPU kernels are interpreted: in fp32 and fp16, since the interpreter's products of bf16
are wrong. On a GPU they are compiled, for the formats that are served there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@contextmanager
def poisoned() -> Iterator[None]:
    """Tensors that are made without a value hold NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Finite, and apart by no more than a few roundings of `dtype` of the largest element."""
    assert actual.isfinite().all()
    scale = expected.float().abs().amax().clamp_min(1e-3)
    assert (actual.float() - expected.float()).abs().amax() <= TOLERANCE[dtype] * scale


def assert_lse(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """-inf in the same places, near in the others."""
    assert torch.equal(actual == -torch.inf, expected == -torch.inf)
    assert_near(actual.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0), dtype)


def fp8_rows(rows_SX: Tensor, latent_width: int, *, row_bytes: int | None = None) -> Tensor:
    """uint8 rows: e4m3 latents, an fp32 scale for each 128 of them, the rest in bf16.

    row_bytes: distance of two rows, what lies between them is NaN in any format.
    """
    count, groups = len(rows_SX), latent_width // 128
    latent = rows_SX[:, :latent_width].float().view(count, groups, 128)
    scale = latent.abs().amax(-1).clamp_min(1e-4) / 448
    parts = [
        (latent / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(count, -1),
        scale,
        rows_SX[:, latent_width:].bfloat16(),
    ]
    packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
    width = packed.shape[1]
    room = packed.new_full((count, row_bytes or width), 0xFF)
    room[:, :width] = packed
    return room[:, :width]


def from_fp8(rows_SX: Tensor, latent_width: int) -> Tensor:
    """What those rows stand for, fp32 [S, C + R]."""
    count, border = len(rows_SX), latent_width + latent_width // 32
    values = rows_SX[:, :latent_width].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows_SX[:, latent_width:border].contiguous().view(torch.float32)
    latent = values.view(count, -1, 128) * scale.unsqueeze(-1)
    rope = rows_SX[:, border:].contiguous().view(torch.bfloat16).float()
    return torch.cat((latent.flatten(1), rope), dim=1)
