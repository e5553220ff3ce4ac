"""Cached rows: what is written lands in its slots and nowhere else, and costs what it says."""

import pytest
import torch
from torch import Tensor

from minidsa.kv_cache.layout import RowLayout
from minidsa.kv_cache.storage import CacheStorage

LAYOUT = RowLayout(latent_width=6, index_width=3, index_layers=(True, False, True))
SLOTS = [8, 3, 11]


def storage_of(dtype: torch.dtype = torch.float32) -> CacheStorage:
    storage = CacheStorage(LAYOUT, 5, 4, dtype, torch.device("cpu"))
    for tensor in tensors(storage):
        tensor.fill_(-7)
    return storage


def tensors(storage: CacheStorage) -> list[Tensor]:
    return [storage.latent_LSC, *(keys for keys in storage.index_k if keys is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_land_in_their_slots_and_neighbours_stay(dtype):
    storage = storage_of(dtype)
    rows, keys = torch.randn(3, 6).to(dtype), torch.randn(3, 3).to(dtype)
    slots = torch.tensor(SLOTS)
    storage.write_latent(1, slots, rows)
    storage.write_index(2, slots, keys)
    assert torch.equal(storage.latent_rows(1, slots), rows)
    assert torch.equal(storage.index_rows(2, slots), keys)
    others = [s for s in range(20) if s not in SLOTS]
    assert (storage.latent_LSC[1, others] == -7).all() and (storage.latent_LSC[[0, 2]] == -7).all()
    written, untouched = storage.index_k[2], storage.index_k[0]
    assert written is not None and untouched is not None
    assert (written[others] == -7).all() and (untouched == -7).all()


def test_slices_are_views_and_slots_of_any_shape_are_copies():
    storage = storage_of()
    view = storage.latent_rows(0, slice(4, 9))
    assert view.data_ptr() == storage.latent_LSC[0, 4].data_ptr() and view.shape == (5, 6)
    copy = storage.index_rows(0, torch.tensor([[1, 2], [3, 4]]))
    assert copy.shape == (2, 2, 3)
    copy.zero_()
    assert all((tensor == -7).all() for tensor in tensors(storage))


def test_a_layer_without_an_indexer_keeps_no_index_keys():
    storage = storage_of()
    assert storage.index_k[1] is None
    for call in (
        lambda: storage.write_index(1, torch.tensor([4]), torch.zeros(1, 3)),
        lambda: storage.index_rows(1, torch.tensor([4])),
        lambda: storage.index_rows(1, slice(0, 4)),
    ):
        with pytest.raises(ValueError, match="layer 1 keeps no index keys"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_token(dtype):
    """What the plan says equals what is allocated, page 0 included."""
    storage = storage_of(dtype)
    assert LAYOUT.elements_per_token == 3 * 6 + 2 * 3
    allocated = sum(tensor.nbytes for tensor in tensors(storage))
    assert allocated == 20 * LAYOUT.bytes_per_token(dtype.itemsize)


@pytest.mark.parametrize(
    ("layers", "indexed", "bytes_per_token"),
    [(61, 61, 61 * 1152 + 61 * 256), (78, 21, 78 * 1152 + 21 * 256), (27, 0, 31_104)],
)
def test_bytes_of_published_shapes(layers, indexed, bytes_per_token):
    """V3.2, GLM-5.2 (57 layers share a selection and own no index keys), V2-Lite, in bf16."""
    owns = tuple(i < indexed for i in range(layers))
    layout = RowLayout(512 + 64, 128 if indexed else 0, owns)
    assert layout.bytes_per_token(2) == bytes_per_token
