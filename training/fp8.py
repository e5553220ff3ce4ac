"""Write the FP8 twin of a checkpoint: 128 x 128 blocks, as DeepSeek-V3.2 is published.

The twin exists for loader tests and is made on demand: `python -m training.fp8 SOURCE TARGET`.
Which tensors are quantised follows the published files: attention projections, the indexer's wq_b
and wk, and all MLPs; never embeddings, head, router, eh_proj, weights_proj or norms.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from .export import CheckpointError, read_tensors, write_json, write_shards

BLOCK = 128
FP8_MAX = 448.0
QUANTISED = (
    "_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "indexer.wq_b.weight",
    "indexer.wk.weight",
)
KEPT = ("weights_proj.weight", "eh_proj.weight")
SETTINGS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "scale_fmt": "ue8m0",
}


def is_quantised(name: str) -> bool:
    """Whether V3.2's files hold this tensor in FP8."""
    return name.endswith(QUANTISED) and not name.endswith(KEPT)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C] -> e4m3 [R, C] and the fp32 scale of each block; weight = value * scale.

    Scales are powers of two (ue8m0). Blocks at the edge are smaller, not padded.
    """
    rows, columns = weight.shape
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    blocks = torch.nn.functional.pad(weight.float(), pad)
    blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    values = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return values[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """The weight in fp32 that `quantise` stored."""
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


def write_twin(source: Path, target: Path) -> int:
    """Quantise the folder `source` into the folder `target`; returns the bytes of its tensors."""
    tensors: dict[str, Tensor] = {}
    for name, value in read_tensors(source).items():
        if is_quantised(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(value)
        else:
            tensors[name] = value
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(target / "config.json", {**config, "quantization_config": SETTINGS})
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, target / file)
    return write_shards(tensors, target)


def main(argv: list[str]) -> int:
    """Two folders on the command line."""
    if len(argv) != 2:
        print("usage: python -m training.fp8 SOURCE TARGET", file=sys.stderr)
        return 2
    try:
        print(f"{write_twin(Path(argv[0]), Path(argv[1])) / 1e6:.1f} MB written to {argv[1]}")
    except (CheckpointError, FileNotFoundError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
