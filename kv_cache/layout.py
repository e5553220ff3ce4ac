"""What one token leaves in the cache, and how many bytes that is.

A token owns a latent row in every layer and an index-key row in every layer that has an indexer.
Both live under the same page id, so whatever moves a page moves the two together. Rows are kept in
the model's format or in fp8, whose bytes `attention/kernels/fp8_rows.py` writes and reads.
"""

from dataclasses import dataclass

FP8_BLOCK = 128  # elements of a latent that share an fp32 scale


@dataclass(frozen=True)
class RowLayout:
    """Widths of the cached rows, in elements.

    latent_width: kv_lora_rank + qk_rope_head_dim; the latent comes first, the rotated key last.
    index_width: width of an index key, 0 for models without an indexer.
    index_layers: for each layer, whether it keeps index keys of its own.
    rope_width: how many of latent_width belong to the rotated key; only fp8 rows need to know.
    is_fp8: latents and index keys in fp8 with fp32 scales, rotated keys in bf16.
    Raises ValueError where fp8 rows cannot have these widths.
    """

    latent_width: int
    index_width: int
    index_layers: tuple[bool, ...]
    rope_width: int = 0
    is_fp8: bool = False

    def __post_init__(self) -> None:
        latent = self.latent_width - self.rope_width
        if self.is_fp8 and (latent % FP8_BLOCK or self.index_width % FP8_BLOCK):
            raise ValueError(
                f"rows in fp8 need latents and index keys of {FP8_BLOCK} * n elements; "
                f"this model has {latent} and {self.index_width}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.index_layers)

    @property
    def elements_per_token(self) -> int:
        return self.num_layers * self.latent_width + sum(self.index_layers) * self.index_width

    @property
    def latent_bytes(self) -> int:
        """Bytes of a latent row in fp8: the latent, its scales and the rotated key."""
        latent = self.latent_width - self.rope_width
        return latent + latent // FP8_BLOCK * 4 + 2 * self.rope_width

    @property
    def index_bytes(self) -> int:
        """Bytes of an index key in fp8, its scale included."""
        return self.index_width + 4

    def latent_bytes_per_token(self, element_size: int) -> int:
        """Bytes of a token's latent rows when an element of the model takes `element_size`."""
        row = self.latent_bytes if self.is_fp8 else self.latent_width * element_size
        return self.num_layers * row

    def index_bytes_per_token(self, element_size: int) -> int:
        """Bytes of a token's index keys, as `latent_bytes_per_token`."""
        row = self.index_bytes if self.is_fp8 else self.index_width * element_size
        return sum(self.index_layers) * row

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes a token costs over all layers when an element takes `element_size` bytes."""
        return self.latent_bytes_per_token(element_size) + self.index_bytes_per_token(element_size)
