"""The memory behind the pages: latent rows and index-key rows of every layer.

Rows are addressed by slot (page * page_size + offset). Page 0 belongs to nobody: padding tokens
write there, so its content is never meaningful.
"""

import torch
from torch import Tensor

from .layout import RowLayout


class CacheStorage:
    """Cached rows of all layers; `num_pages` counts page 0.

    latent_LSC: [layers, slots, latent_width]. index_k[layer]: [slots, index_width], or None where
    the layer owns no indexer. Rows in fp8 are bytes, [slots, latent_bytes] and [slots, index_bytes]
    with all values of a page before all its scales. dtype: the model's, whatever rows are in.
    """

    def __init__(
        self,
        layout: RowLayout,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        slots = num_pages * page_size
        latent, index = layout.latent_width, layout.index_width
        if layout.is_fp8:
            latent, index, dtype = layout.latent_bytes, layout.index_bytes, torch.uint8
        self.latent_LSC = torch.zeros(layout.num_layers, slots, latent, dtype=dtype, device=device)
        self.index_k: list[Tensor | None] = [
            torch.zeros(slots, index, dtype=dtype, device=device) if owns else None
            for owns in layout.index_layers
        ]

    def planes(self) -> list[Tensor]:
        """Every tensor that holds rows, [..., slots, width]: all that moves when a page moves."""
        return [self.latent_LSC, *(keys for keys in self.index_k if keys is not None)]

    def write_latent(self, layer: int, slots_T: Tensor, rows_TX: Tensor) -> None:
        """Store the rows of T tokens, latent and rotated key; not for rows in fp8."""
        self._require_plain()
        self.latent_LSC[layer].index_copy_(0, slots_T, rows_TX)

    def write_index(self, layer: int, slots_T: Tensor, keys_TD: Tensor) -> None:
        """Store the index keys of T tokens; the layer must own an indexer. Not for rows in fp8."""
        self._require_plain()
        self._index_k(layer).index_copy_(0, slots_T, keys_TD)

    def latent_rows(self, layer: int, slots: Tensor | slice) -> Tensor:
        """The latent rows in `slots` as they are stored, [..., latent_width] or bytes.

        A slice gives a view; int64 slots of any shape a copy.
        """
        return _rows(self.latent_LSC[layer], slots)

    def index_rows(self, layer: int, slots: Tensor | slice) -> Tensor:
        """The index keys in `slots`, [..., index_width] or bytes of pages; as `latent_rows`.

        Raises ValueError where the layer owns no indexer.
        """
        return _rows(self._index_k(layer), slots)

    def _require_plain(self) -> None:
        if self.layout.is_fp8:
            raise TypeError("rows in fp8 are written by `attention.cached_rows`")

    def _index_k(self, layer: int) -> Tensor:
        rows_SD = self.index_k[layer]
        if rows_SD is None:
            raise ValueError(f"layer {layer} keeps no index keys")
        return rows_SD


def _rows(rows_SX: Tensor, slots: Tensor | slice) -> Tensor:
    if isinstance(slots, slice):
        return rows_SX[slots]
    # index_select copies half as fast again as indexing does.
    return rows_SX.index_select(0, slots.flatten()).view(*slots.shape, rows_SX.shape[1])
