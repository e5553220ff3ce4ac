"""What one token leaves in the cache, and how many bytes that is.

A token owns a latent row in every layer and an index-key row in every layer that has an indexer.
Both live under the same page id, so whatever moves a page moves the two together.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowLayout:
    """Widths of the cached rows, in elements.

    latent_width: kv_lora_rank + qk_rope_head_dim; the latent comes first, the rotated key last.
    index_width: width of an index key, 0 for models without an indexer.
    index_layers: for each layer, whether it keeps index keys of its own.
    """

    latent_width: int
    index_width: int
    index_layers: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        return len(self.index_layers)

    @property
    def elements_per_token(self) -> int:
        return self.num_layers * self.latent_width + sum(self.index_layers) * self.index_width

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes a token costs over all layers when an element takes `element_size` bytes."""
        return self.elements_per_token * element_size
