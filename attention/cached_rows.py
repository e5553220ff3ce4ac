"""Cached rows as attention sees them, whatever format they are kept in.

`CacheStorage` owns the memory; here it is read as numbers of the model's dtype, and handed to the
kernels that read and write it in place.
"""

import torch
from torch import Tensor

from ..kv_cache.storage import CacheStorage
from .kernels.fp8_rows import Fp8LatentRows, IndexPages, PlainIndexPages

# Pages of which a copy in fp32 exists on the way out of fp8: 38 MB of V3.2 at 64 tokens a page.
PAGES_AT_ONCE = 256


def latent_rows(storage: CacheStorage, layer: int, slots: Tensor | slice) -> Tensor:
    """Latents and rotated keys in `slots`, [..., latent_width] in the model's dtype."""
    if not storage.layout.is_fp8:
        return storage.latent_rows(layer, slots)
    rows = fp8_latents(storage, layer)
    return rows.read(_spelled_out(slots, rows.rows_SX)).to(storage.dtype)


def expand_rows(storage: CacheStorage, layer: int, table_BP: Tensor) -> Tensor:
    """Rows of all pages of a block table, one behind the other, in the model's dtype."""
    pages_N = table_BP.flatten()
    size = storage.page_size
    rows_SX = torch.empty(
        len(pages_N) * size,
        storage.layout.latent_width,
        dtype=storage.dtype,
        device=table_BP.device,
    )
    offsets_P = torch.arange(size, device=table_BP.device)
    for first in range(0, len(pages_N), PAGES_AT_ONCE):
        slots_NP = pages_N[first : first + PAGES_AT_ONCE, None] * size + offsets_P
        place = slice(first * size, first * size + slots_NP.numel())
        rows_SX[place] = latent_rows(storage, layer, slots_NP.flatten())
    return rows_SX


def index_rows(storage: CacheStorage, layer: int, slots: Tensor | slice) -> Tensor:
    """Index keys in `slots`, [..., index_width]: the model's dtype, or fp32 where they are fp8."""
    if not storage.layout.is_fp8:
        return storage.index_rows(layer, slots)
    pages = index_pages(storage, layer)
    return pages.read(_spelled_out(slots, storage.latent_LSC))


def fp8_latents(storage: CacheStorage, layer: int) -> Fp8LatentRows:
    """A layer's latent rows in fp8."""
    layout = storage.layout
    return Fp8LatentRows(storage.latent_LSC[layer], layout.latent_width - layout.rope_width)


def index_pages(storage: CacheStorage, layer: int) -> IndexPages | PlainIndexPages:
    """A layer's index keys as pages; raises ValueError where the layer owns no indexer."""
    rows_SX, size = storage.index_rows(layer, slice(None)), storage.page_size
    if storage.layout.is_fp8:
        return IndexPages(rows_SX.view(-1, size * rows_SX.shape[1]), size)
    return PlainIndexPages(rows_SX.view(-1, size, rows_SX.shape[1]))


def _spelled_out(slots: Tensor | slice, like: Tensor) -> Tensor:
    if isinstance(slots, Tensor):
        return slots
    return torch.arange(slots.start, slots.stop, device=like.device)
