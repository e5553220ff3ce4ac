"""Which backend is taken, why, and what is refused before anything is allocated."""

from typing import Any

import pytest
import torch

from attention_bed import TOPK, Bed
from minidsa.attention import registry
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.registry import Choice, Support, choose
from minidsa.attention.sparse.dsa import DsaBackend


def never(storage):
    raise AssertionError("built although refused")


KERNELS = {
    "kernels": Support(never, ("cuda",), (torch.bfloat16,), (32, 64)),
    "torch": registry.BACKENDS["torch"],
}


@pytest.fixture
def with_kernels(monkeypatch):
    """A second backend, better and choosier than the reference."""
    monkeypatch.setattr(registry, "BACKENDS", KERNELS)


def on(requested: str = "auto", **kwargs: Any) -> Choice:
    wish = {"device_type": "cpu", "dtype": torch.float32, "page_size": 16, "has_indexer": True}
    return choose(requested, **(wish | kwargs))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_reference_takes_any_page_size_and_float(device_type, dtype, page_size):
    choice = on("torch", device_type=device_type, dtype=dtype, page_size=page_size)
    assert choice.name == "torch"


def test_kernels_are_the_best_for_a_gpu_and_the_formats_they_take():
    fits: dict[str, Any] = {"device_type": "cuda", "page_size": 64}
    for dtype in (torch.bfloat16, torch.float16):
        choice = on(dtype=dtype, **fits)
        assert choice.name == "triton"
        assert "the best there is for cuda" in choice.reason
    assert on(dtype=torch.float32, **fits).name == "torch"
    assert on().name == "torch"


def test_reason_says_what_was_chosen_and_why():
    assert on("torch").reason.startswith("attention_backend torch: asked for")
    assert "dense up to index_topk tokens and sparse above" in on().reason
    assert "sparse" not in on(has_indexer=False).reason
    assert "the best there is for cpu" in on("dsa").reason


def test_the_best_that_fits_is_taken(with_kernels):
    fits: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "page_size": 64}
    assert on("auto", **fits).name == on("dsa", **fits).name == "kernels"
    assert on("auto", **fits | {"page_size": 16}).name == "torch"
    assert on("auto", **fits | {"dtype": torch.float32}).name == "torch"
    assert on().name == "torch"


def test_conf_10_an_explicit_wish_that_the_device_lacks_is_one_line(with_kernels):
    with pytest.raises(ValueError, match=r"kernels runs on cuda, not on cpu") as error:
        on("kernels")
    assert "\n" not in str(error.value)


def test_other_misfits_name_what_is_allowed(with_kernels):
    with pytest.raises(ValueError, match=r"takes pages of 32, 64 tokens, not of 16"):
        on("kernels", device_type="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"computes in torch\.bfloat16, not in torch\.float32"):
        on("kernels", device_type="cuda", page_size=64)


def test_nothing_fits_gives_every_reason(with_kernels):
    with pytest.raises(ValueError, match=r"kernels runs on cuda.*; torch runs on cpu, cuda"):
        on(device_type="xpu")


def test_unknown_name_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"'fast' does not exist; there are: auto, dsa, triton"):
        on("fast")


def test_sparse_without_an_indexer_is_refused():
    with pytest.raises(ValueError, match=r"'dsa' needs a model with an indexer.*: auto, triton"):
        on("dsa", has_indexer=False)
    storage = Bed().storage
    with pytest.raises(ValueError, match=r"index_topk is 16, but .* without an indexer"):
        on(has_indexer=False).build(storage, 16)
    with pytest.raises(ValueError, match=r"index_topk is None, but .* with an indexer"):
        on().build(storage, None)


def test_kernels_are_taken_when_asked_for():
    fits: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "page_size": 64}
    assert on("triton", **fits).name == "triton"
    with pytest.raises(ValueError, match="triton runs on cuda, not on cpu"):
        on("triton")


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    missing = Support(never, ("cpu",), (torch.float32,), None, package="no_such_package")
    monkeypatch.setattr(registry, "BACKENDS", {"kernels": missing, **registry.BACKENDS})
    assert on().name == "torch"
    with pytest.raises(ValueError, match="needs the package no_such_package, which is not inst"):
        on("kernels")


def test_build_of_kernels():
    bed = Bed()
    backend = on("triton", device_type="cuda", dtype=torch.bfloat16).build(bed.storage, TOPK)
    assert backend.name == "dsa over triton"


def test_build():
    storage = Bed().storage
    sparse = on().build(storage, TOPK)
    assert isinstance(sparse, DsaBackend) and isinstance(sparse.dense, TorchDenseBackend)
    assert sparse.name == "dsa over torch" and sparse.page_size == storage.page_size
    dense = on(has_indexer=False).build(storage, None)
    assert isinstance(dense, TorchDenseBackend)
