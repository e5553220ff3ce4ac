"""Random weights in place of a checkpoint's: speed and memory of a model need no others.

A folder with config.json and a tokenizer is enough. Weights are made on the device, as fast as it
draws numbers, and keep activations near 1, so that experts are hit as evenly as trained ones.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Generator, Tensor

from .config import ModelConfig
from .deepseek import DeepseekModel
from .loader import CheckedCheckpoint
from .names import EMBEDDING, Slice, name_table

# Of the finite e4m3 numbers, each as likely as any other: the root of their mean square.
E4M3_SIZE = 100.0
E4M3_NAN = 0x7F


def dummy_checkpoint(
    directory: Path, config: ModelConfig, *, with_mtp: bool = False
) -> CheckedCheckpoint:
    """What `check_checkpoint` says of a folder, had it weights; none are looked for."""
    note = "weights are random (load_format is dummy): answers mean nothing"
    return CheckedCheckpoint(directory, config, "loaded" if with_mtp else "none", {}, (note,))


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    alive: Callable[[], None] = lambda: None,
    *,
    with_mtp: bool = False,
    keeps_fp8: bool = False,
) -> DeepseekModel:
    """A model of this shape; the same seed gives the same weights on the same kind of device.

    alive, keeps_fp8: as in `load_weights`.
    """
    model = DeepseekModel(config, dtype, device, with_mtp=with_mtp, keeps_fp8=keeps_fp8)
    generator = Generator(device).manual_seed(seed)
    for name, entry in name_table(model).items():
        _fill(name, entry, generator)
        alive()
    return model


def _fill(name: str, entry: Slice, generator: Generator) -> None:
    """Products keep the size of what they multiply; norms are 1 and biases 0."""
    target = entry.target
    if entry.scales is not None:
        _draw_e4m3(target, generator)
        entry.scales.fill_(target.shape[-1] ** -0.5 / E4M3_SIZE)
    elif target.dim() == 1:
        target.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        size = 1.0 if name == EMBEDDING else target.shape[-1] ** -0.5
        target.normal_(0.0, size, generator=generator)


def _draw_e4m3(target: Tensor, generator: Generator) -> None:
    """Any byte but the two that are NaN."""
    raw = target.view(torch.uint8)
    raw.random_(0, 2 * E4M3_NAN, generator=generator)
    raw += raw >= E4M3_NAN
