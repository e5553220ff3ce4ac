"""Settings of the engine: what is loaded, where it runs, how work is batched and cached.

`None` and "auto" mean "choose for me"; the engine replaces them once it knows the model and the
device, and says each choice with its reason.
"""

from dataclasses import dataclass, field
from typing import Literal

from .log_lines import LogFormat

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of the queue."""

    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step, prompt chunks and decodes together."""
    max_prefill_tokens: int | None = None
    """Prompt tokens of a step in which other requests decode; this is how long a decode waits."""
    prefill_order: Literal["shortest", "oldest"] = "shortest"
    """Which prompt is computed first: the one with the least work left, or the first come."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Who starts first: the first come, or as the field `priority` of the requests says."""
    max_queue: int = 1024
    """Requests in flight beyond `max_num_seqs`; one more is answered 503."""
    queue_timeout: float | None = None
    """Seconds that a request may wait to start before it is answered 503; no bound if not given."""


@dataclass(frozen=True)
class CacheConfig:
    """Size, shape and number format of the paged cache."""

    page_size: int | None = None
    """Tokens a page; 64 on CUDA, 16 on the CPU when not given."""
    row_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    """Format of cached rows: that of the computation, or fp8 (656-byte rows, on a GPU)."""
    num_pages: int | None = None
    """Pages that can be handed out; sized from free memory when not given."""
    memory_fraction: float = 0.5
    """Share of the memory left after the weights that the cache may take when it is sized."""
    prefix_reuse: bool = True
    """Whether rows of a prompt that was computed before are used again."""
    host_bytes: int = 0
    """Host memory for cached rows that must make way on the device; 0 for none."""
    session_dir: str | None = None
    """Folder for saved prefixes; without one nothing is saved, and the routes do not exist."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafting of tokens that the model then verifies; the tokens of an answer do not depend on it.

    "mtp" asks the model's own multi-token-prediction layer, "ngram" looks up what followed the same
    tokens earlier in the request. "auto" takes the first where the checkpoint has the layer.
    """

    method: Literal["auto", "none", "mtp", "ngram"] = "auto"
    num_tokens: int | None = None
    """Drafts of a request in one step, at most; 1 to 7."""
    adaptive: bool = True
    """Draft fewer where more were measured not to pay."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine process needs to start."""

    model: str = ""
    """Folder of a checkpoint in Hugging Face layout."""
    load_format: Literal["auto", "dummy"] = "auto"
    """Read the checkpoint's safetensors, or make random weights of its shape: dummy."""
    dtype: Dtype = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    """Launch every operation by itself, also where CUDA graphs could replay steps, or a CPU what it
    recorded."""
    max_model_len: int | None = None
    """Longest prompt plus output; the model's context when not given."""
    seed: int = 0
    num_threads: int | None = None
    """CPU threads of one operation."""
    hang_timeout: float = 60.0
    """Seconds a single step may take before the engine declares itself hung and exits."""
    load_timeout: float = 120.0
    """Seconds that loading may go without progress, such as one more tensor read."""
    warm_up_timeout: float = 120.0
    """Seconds that the first prefill and the first decode may take together."""
    profile_dir: str | None = None
    """Folder for profiles of the engine; without one none is taken, and the routes do not exist."""
    log_format: LogFormat = "text"
    """Lines of the log for people, or one JSON object a line."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
