"""What one step takes at its peak beside weights and cache, estimated from the configuration.

Sums of the tensors that are alive together in the layer that needs most, per token of the step; the
attention backends work in tiles of a bounded size beside that. Exact to some ten percent: it is
there to leave room, and to refuse a step that could never be computed.
"""

from ..attention.workspace import EXPANDED_BYTES, SCORES_BYTES
from .config import ModelConfig, MoeConfig
from .sequence import PROMPT_ROWS_AT_ONCE

# Tiles of attention and of the selection together, at most; what kernels take on a GPU is more.
TILE_BYTES = 16 << 20
# Steps of more requests are not replayed: there the GPU is busy enough for the host to keep ahead.
LARGEST_REPLAYED = 256
# Steps with prompt chunks of more tokens run eagerly, for the same reason.
LARGEST_CHUNK = 2304
# Numbers of tokens that such steps are padded to, with and without selections.
MOST_CHUNKS = 17 * 2
# Launches of a layer, and what a graph keeps of each of them beside tensors.
LAUNCHES_A_LAYER = 32
LAUNCH_BYTES = 4 << 10
# Graphs that are kept: the sizes of a batch that fills, times a few lengths of block tables.
MOST_SHAPES = 40 * 3
# A row is sampled in fp64: scaled, sorted, its order, probabilities, their sums, and fp32 logits.
SAMPLER_BYTES = 64


def activation_bytes(config: ModelConfig, tokens: int, item_size: int, ranks: int = 1) -> int:
    """Peak of the layers for a step of so many tokens; ranks share heads and widths evenly."""
    hidden = config.hidden_size
    # The residual and the normed input, and the norm's fp32 input with its product.
    stream = hidden * (2 * item_size + 8)
    largest = _attention(config, ranks) * item_size
    if any(config.dense_layers) or config.moe is None:
        largest = max(largest, (3 * config.intermediate_size // ranks + hidden) * item_size)
    if config.moe is not None:
        largest = max(largest, _experts(config.moe, hidden, item_size, ranks))
    return tokens * (stream + largest)


def workspace_bytes(config: ModelConfig, device: str) -> int:
    """What attention works in, however long the step is."""
    if device != "cuda":
        return TILE_BYTES
    return TILE_BYTES + EXPANDED_BYTES + (SCORES_BYTES if config.indexer else 0)


def graph_bytes(config: ModelConfig, requests: int, width: int, tokens: int, item_size: int) -> int:
    """What the graphs keep: of decode steps, `requests` with `width` tokens each at most, and of
    the layers in steps of up to `tokens`.

    All share one pool, as large as the largest step with its logits; each has its own launches, and
    a decode's its inputs and hidden states. What goes from layer to layer is there once.
    """
    rows, chunk = min(requests, LARGEST_REPLAYED) * width, min(tokens, LARGEST_CHUNK)
    pool = activation_bytes(config, rows, item_size) + rows * config.vocab_size * item_size
    pool = max(pool, activation_bytes(config, chunk, item_size))
    launches = LAUNCHES_A_LAYER * config.num_layers * LAUNCH_BYTES
    own = launches + rows * config.hidden_size * item_size
    heads = config.num_heads * (config.nope_dim + config.rope_dim + config.v_dim)
    between = chunk * (2 * config.hidden_size + heads + _index_queries(config)) * item_size
    return pool + MOST_SHAPES * own + MOST_CHUNKS * launches + between


def logits_bytes(config: ModelConfig, rows: int, item_size: int) -> int:
    """Logits of a step with all that sampling makes of them; a prompt is scored in tiles."""
    sampled = rows * (SAMPLER_BYTES + item_size)
    scored = PROMPT_ROWS_AT_ONCE * (12 + item_size)
    return config.vocab_size * max(sampled, scored)


def _attention(config: ModelConfig, ranks: int) -> int:
    """Elements of a token: first projection, queries, both absorbed forms, values, output."""
    heads, latent, rope = config.num_heads // ranks, config.kv_lora_rank, config.rope_dim
    queries = heads * (config.nope_dim + rope)
    index_key = config.indexer.head_dim if config.indexer else 0
    first = (config.q_lora_rank or queries) + latent + rope + index_key + _index_queries(config)
    absorbed = heads * (latent + rope) + heads * latent
    return first + queries + absorbed + heads * config.v_dim + config.hidden_size


def _index_queries(config: ModelConfig) -> int:
    """Elements of a token."""
    return config.indexer.num_heads * config.indexer.head_dim if config.indexer else 0


def _experts(moe: MoeConfig, hidden: int, item_size: int, ranks: int) -> int:
    """Bytes of a token: its rows for every chosen expert, before and behind the experts."""
    width = -(-moe.intermediate_size // ranks)
    chosen = moe.num_chosen + moe.num_shared
    return chosen * max((3 * hidden + 2 * width) * item_size, hidden * (item_size + 4))
