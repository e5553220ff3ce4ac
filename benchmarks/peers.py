"""Other projects' kernels, loaded from the shared objects of their published wheels.

A peer that is missing or does not load is left out of the comparison; `versions` says what loaded.
Expected in the folder: so/_flashmla_C.abi3.so and so/_C_stable_libtorch.abi3.so (out of vLLM's
wheel), so/sgl_common_ops_sm90.abi3.so (sglang-kernel), so/_vllm_fa3_C.abi3.so, deep_gemm/.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

LIBRARIES = {
    "flashmla": "_flashmla_C.abi3.so",
    "vllm": "_C_stable_libtorch.abi3.so",
    "sglang": "sgl_common_ops_sm90.abi3.so",
    "fa3": "_vllm_fa3_C.abi3.so",
}


class Peers:
    """What of the folder could be loaded: `has(name)`; operators are under `torch.ops`."""

    def __init__(self, folder: Path | None) -> None:
        self.versions: dict[str, str] = {}
        self.deep_gemm: ModuleType | None = None
        if folder is None:
            return
        for name, library in LIBRARIES.items():
            path = folder / "so" / library
            if not path.exists():
                continue
            try:
                torch.ops.load_library(str(path))
                self.versions[name] = library
            except OSError as error:
                print(f"{name} is left out: {error}")
        self._load_deep_gemm(folder)

    def has(self, name: str) -> bool:
        return name in self.versions

    def _load_deep_gemm(self, folder: Path) -> None:
        # Its kernels were built beforehand and lie in a cache that this variable names.
        os.environ.setdefault("DG_JIT_CACHE_DIR", str(folder / "dg_cache"))
        sys.path.insert(0, str(folder))
        try:
            self.deep_gemm = importlib.import_module("deep_gemm")
            self.versions["deep_gemm"] = self.deep_gemm.__version__
        except Exception as error:
            print(f"deep_gemm is left out: {error!r}")
