"""Where a layer's projected rows go straight into the cache: one launch instead of a dozen.

Only Triton kernels do that, on a GPU or for rows in fp8; elsewhere the model norms, rotates and
stores by itself.
"""

from dataclasses import dataclass

from torch import Tensor

from ..kv_cache.storage import CacheStorage
from .cached_rows import fp8_latents, index_pages
from .kernels.fp8_rows import IndexPages


@dataclass(frozen=True)
class RowNorms:
    """Weights of a layer's norms: latent_C of the RMSNorm in the model's dtype; index_D, weight and
    bias of the index key's LayerNorm in fp32, None where the layer owns no indexer. One eps."""

    latent_C: Tensor
    index_D: tuple[Tensor, Tensor] | None
    eps: float


def fuses(storage: CacheStorage) -> bool:
    """Whether rows are written by `write_fused`; their widths must be powers of two for that."""
    layout = storage.layout
    if layout.is_fp8:
        return True
    if not storage.latent_LSC.is_cuda:
        return False
    widths = (layout.latent_width - layout.rope_width, layout.rope_width, layout.index_width)
    return all(width & (width - 1) == 0 for width in widths)


def write_fused(
    storage: CacheStorage,
    layer: int,
    projected_TE: Tensor,
    angles_TR: Tensor,
    slots_T: Tensor,
    norms: RowNorms,
) -> None:
    """Norm, rotate, quantise and store T tokens: projected index keys, latents and keys."""
    from .kernels.cache_write import (  # noqa: PLC0415 - only where triton is installed
        IndexWrite,
        LatentWrite,
        write_rows,
    )

    is_fp8 = storage.layout.is_fp8
    latents = fp8_latents(storage, layer) if is_fp8 else storage.latent_LSC[layer]
    index = None
    if norms.index_D is not None:
        pages = index_pages(storage, layer)
        keys = pages if isinstance(pages, IndexPages) else pages.values_NPD.flatten(0, 1)
        index = IndexWrite(*norms.index_D, keys)
    latent = LatentWrite(norms.latent_C, latents)
    write_rows(projected_TE, angles_TR, slots_T, latent, index, norms.eps)
