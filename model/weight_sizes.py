"""How large a model is, from its configuration alone: parameters by what they belong to.

Plain arithmetic without tensors, so that a plan costs milliseconds; tests hold it equal to the
weights that are really allocated.
"""

from typing import NamedTuple

from .config import IndexerConfig, ModelConfig, MoeConfig

# Rows and columns of an fp8 weight that share a scale (`fp8.py`, which needs torch).
BLOCK = 128

# Columns of a weight that a CPU keeps in a second form, for few rows.
NARROW_UP_TO = 512


class Part(NamedTuple):
    """Parameters of one kind.

    split: those that ranks of tensor parallelism would share out between them. whole: those that
    each keeps. fp32: those that stay in fp32 whatever the model's dtype. scaled, scaled_whole:
    those of `split` and of `whole` that products take in block-scaled fp8. padding: zeros behind
    them that fill up the last blocks; no parameters.
    """

    split: int = 0
    whole: int = 0
    fp32: int = 0
    scaled: int = 0
    scaled_whole: int = 0
    padding: int = 0

    @property
    def parameters(self) -> int:
        return self.split + self.whole + self.fp32

    def nbytes(self, item_size: int, ranks: int = 1, *, keeps_fp8: bool = False) -> int:
        """Bytes on each rank when an element takes `item_size` bytes.

        keeps_fp8: weights that products take in fp8 are kept so, with their scales.
        """
        if not keeps_fp8:
            return (-(-self.split // ranks) + self.whole) * item_size + self.fp32 * 4
        plain = -(-(self.split - self.scaled) // ranks) + self.whole - self.scaled_whole
        kept = self.scaled_whole + self.padding
        blocks, shared = (self.scaled + kept) // BLOCK**2, self.scaled // BLOCK**2
        fp8 = -(-(self.scaled + 4 * shared) // ranks) + kept + 4 * (blocks - shared)
        return plain * item_size + self.fp32 * 4 + fp8

    def plus(self, other: "Part", times: int = 1) -> "Part":
        return Part(*(a + times * b for a, b in zip(self, other, strict=True)))


def weight_sizes(config: ModelConfig, *, with_mtp: bool) -> dict[str, Part]:
    """Parameters of the whole model by kind; kinds that it has none of are left out."""
    hidden = config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    sizes = {"embedding and head": Part(tables * config.vocab_size * hidden, hidden)}
    dense = sum(config.dense_layers)
    _add(sizes, config, dense, is_dense=True)
    _add(sizes, config, config.num_layers - dense, is_dense=False)
    if with_mtp:
        layer: dict[str, Part] = {}
        _add(layer, config, 1, is_dense=config.moe is None)
        # The product that joins a token to the hidden state before it, and three norms.
        own = Part(0, 2 * hidden * hidden + 3 * hidden)
        sizes["MTP layer"] = _sum(layer).plus(own)
    return sizes


def total(sizes: dict[str, Part]) -> Part:
    """All kinds together."""
    return _sum(sizes)


def packed_copies(config: ModelConfig, *, with_mtp: bool) -> Part:
    """What a CPU keeps twice in fp32, at most: narrow products (`Linear.pack`), and a tied head."""
    table = config.vocab_size * config.hidden_size
    if config.hidden_size > NARROW_UP_TO:
        return Part(split=table if config.tie_word_embeddings else 0)
    whole = total(weight_sizes(config, with_mtp=with_mtp))
    return Part(whole.split - (0 if config.tie_word_embeddings else table), whole.whole)


def _sum(sizes: dict[str, Part]) -> Part:
    part = Part()
    for other in sizes.values():
        part = part.plus(other)
    return part


def _add(sizes: dict[str, Part], config: ModelConfig, layers: int, *, is_dense: bool) -> None:
    """Add so many layers of one kind."""
    if not layers:
        return
    parts = {"attention": _attention(config)}
    if config.indexer is not None:
        parts["indexer"] = _indexer(config, config.indexer)
    if is_dense or config.moe is None:
        width = config.intermediate_size
        first = _fp8_linear(width, width, columns=config.hidden_size)
        parts["dense MLP"] = first.plus(_fp8_linear(config.hidden_size, columns=width))
    else:
        gate = (config.hidden_size + 1) * config.moe.num_experts
        parts["experts"] = _experts(config.moe, config.hidden_size)._replace(fp32=gate)
    for name, part in parts.items():
        sizes[name] = sizes.get(name, Part()).plus(part, layers)


def _attention(config: ModelConfig) -> Part:
    """With the two norms of the layer."""
    hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    part = _fp8_linear(hidden, columns=heads * config.v_dim)
    part = part.plus(Part(heads * (config.nope_dim + config.v_dim) * latent, latent + 2 * hidden))
    part = part.plus(_whole(_first_projection(config, latent + config.rope_dim)))
    queries, rank = heads * (config.nope_dim + config.rope_dim), config.q_lora_rank
    if rank is None:
        return part.plus(_first_projection(config, queries))
    up = _fp8_linear(queries, columns=rank, in_blocks=config.rope.interleaved)
    return part.plus(up).plus(_whole(_first_projection(config, rank))).plus(Part(0, rank))


def _indexer(config: ModelConfig, indexer: IndexerConfig) -> Part:
    queries = indexer.num_heads * indexer.head_dim * (config.q_lora_rank or 0)
    norm_and_weights = 2 * indexer.head_dim + indexer.num_heads * config.hidden_size
    keys = _whole(_first_projection(config, indexer.head_dim))
    return keys.plus(Part(0, queries, norm_and_weights))


def _first_projection(config: ModelConfig, rows: int) -> Part:
    """Those rows of it that are one tensor of the checkpoint; `layers.mla` joins them."""
    first = config.q_lora_rank or config.num_heads * (config.nope_dim + config.rope_dim)
    index_width = config.indexer.head_dim if config.indexer else 0
    in_blocks = config.rope.interleaved and index_width in (0, BLOCK) and first % BLOCK == 0
    return _fp8_linear(rows, columns=config.hidden_size, in_blocks=in_blocks)


def _experts(moe: MoeConfig, hidden: int) -> Part:
    size = 3 * hidden * moe.intermediate_size * (moe.num_experts + moe.num_shared)
    fits = moe.intermediate_size % BLOCK == hidden % BLOCK == 0
    return Part(size, scaled=size if fits else 0)


def _fp8_linear(*parts: int, columns: int, in_blocks: bool = True) -> Part:
    """As `Allocator.fp8_linear` decides."""
    rows = sum(parts)
    if not in_blocks or any(size % BLOCK for size in (columns, *parts[:-1])):
        return Part(rows * columns)
    return Part(rows * columns, scaled=rows * columns, padding=-rows % BLOCK * columns)


def _whole(part: Part) -> Part:
    """The same, but not shared out."""
    return Part(whole=part.split, scaled_whole=part.scaled, padding=part.padding)
