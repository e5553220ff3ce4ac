"""Weights through threads and pieces: every byte arrives, errors come in the order of the names."""

import time

import pytest
import torch

from minidsa.model.upload import Uploader

CPU = torch.device("cpu")


def test_tensors_arrive_as_they_are():
    """More bytes than a piece, a piece that ends within an element, no byte at all, one number."""
    sources = {
        "bf16": torch.randn(33, 7).bfloat16(),
        "fp8": torch.randn(5, 128).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5),
    }
    upload, arrived = Uploader(CPU, piece_bytes=50), {}

    def place(name: str) -> str:
        arrived[name] = upload(sources[name])
        return name

    assert list(upload.each(place, sources)) == list(sources)
    for name, source in sources.items():
        assert arrived[name].dtype == source.dtype
        assert arrived[name].shape == source.shape
        assert torch.equal(arrived[name].float(), source.float())
        assert arrived[name].data_ptr() != source.data_ptr() or not source.numel()


def test_an_error_is_raised_in_its_turn_and_ends_the_rest():
    begun, names = [], [f"tensor {i}" for i in range(1000)]

    def place(name: str) -> str:
        begun.append(name)
        if name == "tensor 2":
            raise ValueError(name)
        if name not in names[:2]:
            time.sleep(0.1)  # all of them would take 25 s, four at a time
        return name

    loading = Uploader(CPU, piece_bytes=50).each(place, names)
    assert [next(loading), next(loading)] == names[:2]
    with pytest.raises(ValueError, match="tensor 2"):
        next(loading)
    assert len(begun) < len(names)
