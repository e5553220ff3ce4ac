"""The tensor data of a checkpoint whose headers were checked: one tensor at a time, unquantised.

Files are mapped, not read: memory is touched when a tensor is used.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from safetensors import safe_open
from torch import Tensor

from .checkpoint import TensorInfo
from .fp8 import FP8, SCALE_SUFFIX, dequantise, plain_scale


class WeightFiles:
    """A context manager: the files of `tensors` are open inside it.

    move: what each stored tensor goes through first; None leaves it where the file is mapped.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, TensorInfo],
        move: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._directory = directory
        self._tensors = tensors
        self._move = move
        self._opened: dict[str, safe_open] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for file in {info.file for info in self._tensors.values()}:
            opened = safe_open(self._directory / file, framework="pt")
            self._opened[file] = self._stack.enter_context(opened)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """A tensor as stored; fp32 where it is stored in fp8 blocks."""
        info = self._tensors[name]
        weight = self._stored(name)
        return (
            dequantise(weight, self._stored(name + SCALE_SUFFIX)) if info.dtype == FP8 else weight
        )

    def read_fp8(self, name: str) -> tuple[Tensor, Tensor]:
        """The e4m3 values of a tensor that is stored in fp8 blocks, and their fp32 scales."""
        return self._stored(name), plain_scale(self._stored(name + SCALE_SUFFIX))

    def nbytes(self, name: str) -> int:
        """Bytes that `read` reads, scales included."""
        scale = self._tensors.get(name + SCALE_SUFFIX)
        return self._tensors[name].nbytes + (0 if scale is None else scale.nbytes)

    def _stored(self, name: str) -> Tensor:
        stored = self._opened[self._tensors[name].file].get_tensor(name)
        return stored if self._move is None else self._move(stored)
