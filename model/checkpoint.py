"""A checkpoint folder as untrusted input: which files it has and what their headers say.

Nothing outside the folder is opened, no code and no pickle is ever run, and no tensor is read
here. Everything that can be wrong is one line that names the file and the tensor.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .config import ModelConfig, parse_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# In safetensors' spelling: weights, and the scales of fp8 weights.
ITEM_BYTES = (("F32", 4), ("BF16", 2), ("F16", 2), ("F8_E4M3", 1), ("F8_E8M0", 1), ("U8", 1))


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the message names the file and the tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor; dtype in safetensors' spelling."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its data; raises KeyError for a dtype that no weight is stored in."""
        return math.prod(self.shape) * dict(ITEM_BYTES)[self.dtype]


def read_config(directory: Path) -> ModelConfig:
    """Parse config.json and generation_config.json of a checkpoint folder.

    Raises CheckpointError or ConfigError; a folder that wants its own code run is refused.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder")
    raw = read_json(directory, "config.json")
    others = {
        name: read_json(directory, name)
        for name in ("generation_config.json", "tokenizer_config.json")
        if _exists(directory, name)
    }
    for name, content in ({"config.json": raw} | others).items():
        if content.get("auto_map"):
            raise CheckpointError(f"{name}: auto_map asks for code of the checkpoint; never run")
    return parse_config(raw, others.get("generation_config.json"))


def read_json(directory: Path, name: str) -> Mapping[str, object]:
    """A JSON object in the folder."""
    path = inside(directory, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: a JSON object is expected")
    return content


def inside(directory: Path, name: str) -> Path:
    """Path of a file of the folder; refuses separators and symbolic links that lead out of it."""
    path = directory / name
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{name!r}: not the name of a file in {directory}")
    if not path.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{name}: leads outside {directory}")
    if not path.is_file():
        raise CheckpointError(f"{name}: no such file in {directory}")
    return path


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint's weight files, from their headers alone."""
    listed = _listed_files(directory)
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(listed.values())) if listed else [SINGLE]:
        for name, info in _read_header(directory, file):
            if name in tensors:
                raise CheckpointError(f"{file}: {name} is also in {tensors[name].file}")
            tensors[name] = info
    if listed:
        _compare_with_index(listed, tensors)
    return tensors


def _listed_files(directory: Path) -> dict[str, str]:
    """Tensor to file from the index; empty for a checkpoint of a single file."""
    if _exists(directory, INDEX):
        if _exists(directory, SINGLE):
            raise CheckpointError(f"both {SINGLE} and {INDEX} are present: which one counts?")
        weight_map = read_json(directory, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{INDEX}: weight_map is missing or empty")
        wrong = next((n for n, f in weight_map.items() if not isinstance(f, str)), None)
        if wrong is not None:
            raise CheckpointError(f"{INDEX}: {wrong} has no file name")
        return weight_map
    if _exists(directory, SINGLE):
        return {}
    pickles = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt*"))
    if pickles:
        raise CheckpointError(f"{pickles[0].name}: pickled weights are never read; {SINGLE} needed")
    raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX}")


def _exists(directory: Path, name: str) -> bool:
    path = directory / name
    return path.exists() or path.is_symlink()


def _read_header(directory: Path, file: str) -> Iterable[tuple[str, TensorInfo]]:
    path = inside(directory, file)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{file}: only safetensors files are read")
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  safe_open is no mapping
                part = opened.get_slice(name)
                yield name, TensorInfo(file, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or not a safetensors file ({error})") from error


def _compare_with_index(listed: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    for name, file in listed.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(f"{INDEX}: {name} is not in {file}")
    for name, info in tensors.items():
        if name not in listed:
            raise CheckpointError(f"{info.file}: {name} is not listed in {INDEX}")
