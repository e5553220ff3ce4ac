"""What tests of kernels share: where they run, outputs full of NaN, rows in fp8.

Without a GPU kernels are interpreted: in fp32 and fp16, since the interpreter's products of bf16
are wrong. On a GPU they are compiled, for the formats that are served there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minidsa.attention.kernels.fp8_rows import Fp8LatentRows
from minidsa.model.captured_step import Run

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


def run_again(run: Run) -> Run:
    """In place of a captured graph: the same work again, over the same tensors."""
    return run


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


def fp8_rows(rows_SX: Tensor, latent_width: int, *, row_bytes: int | None = None) -> Fp8LatentRows:
    """Rows [S, C + R] in fp8; row_bytes: distance of two rows, with NaN in any format between."""
    count, width = rows_SX.shape
    size = latent_width + latent_width // 32 + 2 * (width - latent_width)
    room = torch.full((count, row_bytes or size), 0xFF, dtype=torch.uint8, device=DEVICE)
    rows = Fp8LatentRows(room[:, :size], latent_width)
    latent, rope = rows_SX.float().split((latent_width, width - latent_width), dim=1)
    rows.write(torch.arange(count, device=DEVICE), latent, rope)
    return rows
