"""Write and read a checkpoint folder: config.json, tokenizer, bf16 safetensors in HF naming.

The names are those of DeepSeek-V3.2, so transformers and any engine load the folder unchanged. The
MTP layer is layer `num_hidden_layers`; its embedding and head are the model's own and left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import ModelConfig, read_config
from .network import TinyDsa

SHARD_BYTES = 14_000_000
# V3.2 stores these in fp32 even in its FP8 files.
FP32_NAMES = ("norm.weight", "norm.bias", "e_score_correction_bias")
GENERATION = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": False,
}


class CheckpointError(RuntimeError):
    """The folder is not what the trainer writes; the message says what to do."""


def is_fp32(name: str) -> bool:
    """Whether V3.2 keeps the tensor in fp32: norms and the router's bias."""
    return name.endswith(FP32_NAMES)


def to_checkpoint(model: TinyDsa) -> dict[str, Tensor]:
    """Tensors by checkpoint name, on the CPU, in the dtype they ship in."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.split(".")[-2] != "experts":
            tensors[name] = value
            continue
        prefix, projection = name.rsplit(".", 1)
        for expert, weight in enumerate(value):
            tensors[f"{prefix}.{expert}.{projection}.weight"] = weight
    return {
        name: value.detach()
        .to("cpu", torch.float32 if is_fp32(name) else torch.bfloat16)
        .contiguous()
        for name, value in tensors.items()
    }


def from_checkpoint(model: TinyDsa, tensors: dict[str, Tensor]) -> None:
    """The inverse of `to_checkpoint`, into an existing model."""
    state = {}
    for name, value in model.state_dict().items():
        if name.split(".")[-2] != "experts":
            state[name] = tensors[name].to(value.dtype)
            continue
        prefix, projection = name.rsplit(".", 1)
        stacked = [tensors[f"{prefix}.{e}.{projection}.weight"] for e in range(len(value))]
        state[name] = torch.stack(stacked).to(value.dtype)
    model.load_state_dict(state)


def write_shards(tensors: dict[str, Tensor], folder: Path, limit: int = SHARD_BYTES) -> int:
    """Write `model-0000i-of-0000n.safetensors` and the index; returns the number of bytes."""
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, value in tensors.items():
        if value.nbytes > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = value
        room -= value.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return total


def write_json(path: Path, value: object) -> None:
    """JSON as all files of a checkpoint are written: two spaces, names unescaped."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: TinyDsa, folder: Path) -> int:
    """Write the model and its two configs; the tokenizer files are written by `tokenizer.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model.config.to_json())
    write_json(folder / "generation_config.json", GENERATION)
    return write_shards(to_checkpoint(model), folder)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise CheckpointError(f"{index} is missing: give a folder that `python -m training` wrote")
    files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    tensors = {}
    for file in sorted(files):
        with safe_open(folder / file, framework="pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def load(folder: Path, device: str = "cpu") -> TinyDsa:
    """The exported model in fp32, ready to evaluate."""
    config: ModelConfig = read_config(folder)
    model = TinyDsa(config)
    from_checkpoint(model, read_tensors(folder))
    return model.to(device).eval()
