"""What was loaded and how: the facts that start-up lines and request validation need.

The model's side fills it, the API process reads it, and neither imports the other.
"""

from typing import Literal

import msgspec

MtpLayerUse = Literal["none", "loaded", "unused"]


class StartPlan(msgspec.Struct, frozen=True):
    """What is about to be loaded: enough for the text side to check its own files against.

    lines: the memory that it will take, for people.
    """

    model_type: str
    vocab_size: int
    lines: list[str]


class EngineInfo(msgspec.Struct, frozen=True):
    """One loaded checkpoint with the settings in force.

    `notes` are the automatic choices, one sentence each with its reason. `mtp_layer` says whether
    the checkpoint has a multi-token-prediction layer and `num_parameters` counts it. A model
    without an indexer has no `index_topk`.
    """

    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str
    attention_backend: str
    page_size: int
    num_cache_tokens: int
    cache_bytes_per_token: int
    cache_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    speculative: Literal["none", "mtp", "ngram"]
    num_speculative_tokens: int
    notes: list[str]
    mtp_layer: MtpLayerUse = "none"
    index_topk: int | None = None
