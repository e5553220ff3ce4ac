"""Backends by name, what each supports, and which one to take.

Every wish is checked before anything is allocated or compiled, so a wrong one costs a line, not a
start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

import torch

from ..kv_cache.storage import CacheStorage
from .base import AttentionBackend
from .dense.torch_ref import TorchDenseBackend
from .sparse.dsa import DsaBackend


@dataclass(frozen=True)
class Support:
    """A dense backend and what it runs on; page_sizes None: any. package: must be installed."""

    build: Callable[[CacheStorage], AttentionBackend]
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    page_sizes: tuple[int, ...] | None
    package: str | None = None


def _triton(storage: CacheStorage) -> AttentionBackend:
    from .dense.triton import TritonDenseBackend  # noqa: PLC0415 - only where triton is installed

    return TritonDenseBackend(storage)


# Best first: "auto" takes the first that supports what is asked. A model with an indexer gets
# sparse attention around the one that is taken; "dsa" is "auto" for those who insist on that.
BACKENDS: Mapping[str, Support] = MappingProxyType(
    {
        "triton": Support(
            _triton, ("cuda",), (torch.bfloat16, torch.float16), None, package="triton"
        ),
        "torch": Support(
            TorchDenseBackend,
            ("cpu", "cuda"),
            (torch.float32, torch.bfloat16, torch.float16),
            None,
        ),
    }
)
ANY = ("auto", "dsa")


@dataclass(frozen=True)
class Choice:
    """A backend that fits, with the reason in one sentence. sparse: the model has an indexer."""

    name: str
    reason: str
    sparse: bool

    def build(self, storage: CacheStorage, index_topk: int | None) -> AttentionBackend:
        """The backend over `storage`; with `index_topk`, sparse attention around it.

        Raises ValueError when there is an `index_topk` and no indexer, or the other way round.
        """
        if (index_topk is not None) != self.sparse:
            raise ValueError(
                f"index_topk is {index_topk}, but the backend was chosen for a model "
                f"{'with' if self.sparse else 'without'} an indexer"
            )
        dense = BACKENDS[self.name].build(storage)
        return dense if index_topk is None else DsaBackend(dense, storage, index_topk)


def choose(
    requested: str, *, device_type: str, dtype: torch.dtype, page_size: int, has_indexer: bool
) -> Choice:
    """Choose by name, or the best for "auto"; raises ValueError that names what does not fit."""
    if requested not in (*ANY, *BACKENDS):
        names = ", ".join((*ANY, *BACKENDS))
        raise ValueError(f"attention_backend {requested!r} does not exist; there are: {names}")
    if requested == "dsa" and not has_indexer:
        names = ", ".join(("auto", *BACKENDS))
        raise ValueError(
            f"attention_backend 'dsa' needs a model with an indexer; this one can take: {names}"
        )
    names = list(BACKENDS) if requested in ANY else [requested]
    misfits = {name: _misfit(BACKENDS[name], device_type, dtype, page_size) for name in names}
    fitting = next((name for name, misfit in misfits.items() if misfit is None), None)
    if fitting is None:
        reasons = "; ".join(f"{name} {misfit}" for name, misfit in misfits.items())
        raise ValueError(f"no attention backend fits: {reasons}")
    why = "asked for" if requested == fitting else f"the best there is for {device_type}"
    scope = ", dense up to index_topk tokens and sparse above" if has_indexer else ""
    return Choice(fitting, f"attention_backend {fitting}: {why}{scope}", has_indexer)


def _misfit(support: Support, device_type: str, dtype: torch.dtype, page_size: int) -> str | None:
    if device_type not in support.device_types:
        return f"runs on {', '.join(support.device_types)}, not on {device_type}"
    if dtype not in support.dtypes:
        return f"computes in {', '.join(map(str, support.dtypes))}, not in {dtype}"
    if support.package is not None and find_spec(support.package) is None:
        return f"needs the package {support.package}, which is not installed"
    if support.page_sizes is not None and page_size not in support.page_sizes:
        sizes = ", ".join(map(str, support.page_sizes))
        return f"takes pages of {sizes} tokens, not of {page_size}"
    return None
