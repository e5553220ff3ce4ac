"""Ways to damage a checkpoint, and the one way it has to be refused."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minidsa.model.checkpoint import SINGLE, CheckpointError, TensorInfo, read_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.keys import ConfigError
from minidsa.model.loader import check_checkpoint, load_model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DeepseekModel:
    return load_model(folder, read_config(folder), dtype, torch.device("cpu"))


def check(folder: Path) -> dict[str, TensorInfo]:
    return check_checkpoint(folder, read_config(folder)).tensors


def edit(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = SINGLE
) -> None:
    """Change the tensors of one file in place."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def edit_json(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON object in place."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def refused(folder: Path, *names: str) -> None:
    """The checkpoint is refused within two seconds by one line that names all of `names`."""
    start = time.monotonic()
    with pytest.raises((CheckpointError, ConfigError)) as error:
        check(folder)
    assert time.monotonic() - start < 2
    message = str(error.value)
    assert "\n" not in message
    for name in names:
        assert name in message
