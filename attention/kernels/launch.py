"""What launches of kernels need: a compiler without types, tiles, and the size of the GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

# Launch options such as num_warps are no parameters of a kernel's function: to a type checker a
# kernel is anything.
jit: Callable[[Callable[..., Any]], Any] = triton.jit


@dataclass(frozen=True)
class Tiling:
    """Query rows and keys of a tile, latent columns of a group, warps and stages of loads.

    programs: how many run on a multiprocessor at once. by_hand: of the kernel for Hopper
    (`few_heads.py` for at most 32 rows, `latent_hopper.py`) rather than the portable one.
    """

    rows: int
    keys: int
    group: int
    num_warps: int
    num_stages: int
    programs: int
    by_hand: bool = False


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n, for n of at least 1."""
    return 1 << (n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
