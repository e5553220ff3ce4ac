"""From a checkpoint folder to a model: check everything first, then stream the weights in.

Strict both ways: every tensor the configuration implies must be there, and nothing else may be.
All of that is decided from headers, before memory for a single weight is taken.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

from .checkpoint import CheckpointError, TensorInfo, read_headers
from .config import ModelConfig
from .deepseek import DeepseekModel
from .fp8 import FP8, SCALE_DTYPES, SCALE_SUFFIX, dequantise, scale_shape
from .names import Slice, name_table, unused_shapes

logger = logging.getLogger(__name__)

PLAIN_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Headers = Mapping[str, TensorInfo]


def check_checkpoint(
    directory: Path, config: ModelConfig, *, with_mtp: bool = False
) -> dict[str, TensorInfo]:
    """Compare the headers with what the configuration implies; reads no tensor data.

    Returns the tensors to load, fp8 scales included. Raises CheckpointError naming what is wrong.
    """
    model = DeepseekModel(config, torch.float32, torch.device("meta"), with_mtp=with_mtp)
    needed = {name: entry.shape for name, entry in name_table(model).items()}
    found = read_headers(directory)
    shapes = unused_shapes(config) | needed
    for name, info in found.items():
        if name.endswith(SCALE_SUFFIX):
            _check_scale(name, info, found)
        elif name not in shapes:
            raise CheckpointError(f"{info.file}: unknown tensor {name}{_hint(name, config)}")
        else:
            _check_tensor(name, shapes[name], found, config)
    missing = next((name for name in needed if name not in found), None)
    if missing is not None:
        raise CheckpointError(f"{directory}: tensor {missing} is missing")
    kept = {n: info for n, info in found.items() if n.removesuffix(SCALE_SUFFIX) in needed}
    if len(kept) < len(found):
        unused = next(name for name in found if name not in kept)
        logger.info("skipping %d tensors not used, such as %s", len(found) - len(kept), unused)
    return kept


def has_mtp_layer(directory: Path, config: ModelConfig) -> bool:
    """Whether the checkpoint holds the layer that guesses ahead, whatever its config.json says."""
    return f"model.layers.{config.num_layers}.eh_proj.weight" in read_headers(directory)


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_mtp: bool = False,
) -> DeepseekModel:
    """Check the checkpoint, allocate the model once and fill it; fp8 weights are dequantised.

    Raises CheckpointError, also for a tensor that holds NaN or infinity.
    """
    headers = check_checkpoint(directory, config, with_mtp=with_mtp)
    model = DeepseekModel(config, dtype, device, with_mtp=with_mtp)
    table = name_table(model)
    names_of_file: dict[str, list[str]] = defaultdict(list)
    for name, info in headers.items():
        names_of_file[info.file].append(name)
    total = sum((directory / file).stat().st_size for file in names_of_file)
    # Its default lock is a system-wide semaphore, which a killed engine would leave behind.
    tqdm.set_lock(threading.RLock())
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(directory / file, framework="pt"))
            for file in names_of_file
        }
        # disable=None: no bar where nobody watches.
        bar = stack.enter_context(
            tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=None)
        )
        for name, entry in table.items():
            info = headers[name]
            weight = opened[info.file].get_tensor(name)
            bar.update(weight.nbytes)
            if info.dtype == FP8:
                scale_name = name + SCALE_SUFFIX
                scale = opened[headers[scale_name].file].get_tensor(scale_name)
                weight = dequantise(weight, scale)
            entry.fill(weight)
            _check_finite(name, info, entry)
    return model


def _check_tensor(name: str, shape: tuple[int, ...], found: Headers, config: ModelConfig) -> None:
    info = found[name]
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: {name} has shape {list(info.shape)}, the configuration "
            f"implies {list(shape)}"
        )
    declared = list(PLAIN_DTYPES.values()) if config.dtype is None else [PLAIN_DTYPES[config.dtype]]
    allowed = {"F32", *declared} | ({FP8} if config.quantised and len(shape) == 2 else set())
    if info.dtype not in allowed:
        raise CheckpointError(
            f"{info.file}: {name} has dtype {info.dtype}, expected {' or '.join(sorted(allowed))}"
        )
    if info.dtype == FP8 and name + SCALE_SUFFIX not in found:
        raise CheckpointError(f"{info.file}: {name} is fp8 and {name}{SCALE_SUFFIX} is missing")


def _check_scale(name: str, info: TensorInfo, found: Headers) -> None:
    weight = found.get(name.removesuffix(SCALE_SUFFIX))
    if weight is None or weight.dtype != FP8:
        raise CheckpointError(f"{info.file}: unknown tensor {name}: it scales no fp8 weight")
    if info.shape != scale_shape(weight.shape):
        raise CheckpointError(
            f"{info.file}: {name} has shape {list(info.shape)}, blocks of 128 x 128 "
            f"imply {list(scale_shape(weight.shape))}"
        )
    if info.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{info.file}: {name} has dtype {info.dtype}, expected {' or '.join(SCALE_DTYPES)}"
        )


def _hint(name: str, config: ModelConfig) -> str:
    """Why a tensor of a layer that does not exist is unknown."""
    index = name.removeprefix("model.layers.").split(".")[0]
    if not name.startswith("model.layers.") or not index.isdecimal():
        return ""
    if int(index) < config.num_layers:
        return ""
    return f" (num_hidden_layers = {config.num_layers})"


def _check_finite(name: str, info: TensorInfo, entry: Slice) -> None:
    """On the filled target, so that overflow of a conversion shows too."""
    extremes = torch.stack(torch.aminmax(entry.target))
    if not bool(extremes.isfinite().all()):
        raise CheckpointError(f"{info.file}: {name} holds NaN or infinity")
