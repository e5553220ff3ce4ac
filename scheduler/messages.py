"""What the API process and the engine process say to each other.

A closed schema of msgspec structs: only these types can come out of the decoder, so nothing a
client sends can reach the engine in another form. This module is torch-free because both sides
import it.
"""

from typing import Literal

import msgspec

from ..configs.engine_info import EngineInfo, StartPlan
from ..configs.logprobs import TokenLogprobs
from ..configs.sampling import SamplingParams

# "complete": the grammar of the request is satisfied and admits nothing more.
FinishReason = Literal["stop", "complete", "length", "abort", "error"]
ErrorKind = Literal["invalid", "overloaded", "timeout", "internal"]


class Handling(msgspec.Struct, frozen=True):
    """How a request is treated, beside what its tokens are.

    Cached rows are shared between requests of equal `tenant` (named by the server) and equal
    `cache_salt` (named by the client) alone. `uses_cache` false: rows of this request are neither
    taken from the cache nor left in it. Of the requests of a tenant the one with the smallest
    `priority` goes first. After `deadline_seconds` a request ends where it is.
    """

    tenant: str = ""
    cache_salt: str = ""
    uses_cache: bool = True
    priority: int = 0
    deadline_seconds: float | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Generate from `prompt_ids` (never empty, inside the vocabulary and the context).

    `grammar` is what the answer must match; see `grammar.py`.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    grammar: str | None = None
    handling: Handling = Handling()


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free its pages; unknown and finished ids are ignored."""

    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Forget every cached prefix, unless requests are in the engine; replied to by Answer."""


class SaveSession(msgspec.Struct, frozen=True, tag="save_session"):
    """Write the cached rows of `token_ids` to the file of this name; replied to by Answer.

    `tenant` and `cache_salt` are those of the requests that left the rows, see Handling.
    """

    name: str
    token_ids: list[int]
    tenant: str = ""
    cache_salt: str = ""


class RestoreSession(msgspec.Struct, frozen=True, tag="restore_session"):
    """Let the rows of a saved session be found again; replied to by Answer."""

    name: str
    tenant: str = ""
    cache_salt: str = ""


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Record what the engine computes from now on; replied to by Answer."""


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write what was recorded; replied to by Answer, which names the file."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop once the current step is done; running requests are dropped."""


Question = FlushCache | SaveSession | RestoreSession | StartProfile | StopProfile
Command = Submit | Abort | Question | Shutdown


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step produced for one request.

    A stop id that ended the request is the last of `token_ids`. `logprobs` runs parallel to
    `token_ids`. `prompt_logprobs` arrives once, with the first token (or with the end of a request
    that asked for none): one entry per prompt token but the first. `error` explains
    `finish_reason="error"`; its kind tells a request that can never be served (400), one that came
    when the queue was full or waited too long (503), and one that the engine failed to compute
    (500). `num_drafted` tokens were verified for this output, of which the first `num_accepted`
    stand in `token_ids`. `cached_tokens` counts the prompt tokens whose rows were in the cache.
    `queue_seconds`, from the request's arrival to its first step, comes with the first output.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    cached_tokens: int = 0
    queue_seconds: float | None = None


class DraftStats(msgspec.Struct, frozen=True):
    """Counters of speculative decoding, and how many drafts a step takes now.

    num_drafts counts verify passes, each of one request; accepted_at[i] how often draft i was
    accepted.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_at: list[int]
    length: int


class SelectionStats(msgspec.Struct, frozen=True):
    """Counters of sparse attention: see `attention.sparse.selection_counts`."""

    num_timed: int
    seconds: float
    num_rows: int
    num_keys: int


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges of now and counters since the start.

    num_free_pages: pages that no request holds; idle pages of the prefix cache are among them.
    num_prefix_queries, num_prefix_hits: prompt tokens of requests that looked into the cache, and
    those of them that were found. step_sizes: how many steps had as many tokens as each of
    `stats.STEP_SIZES` at most but more than the size before, and last those that had more.
    selection: None for a model without an indexer.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0  # that can be handed out: page 0 is not among them
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0  # that steps took to compute, all together
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_evictions: int = 0
    num_host_pages: int = 0  # pages whose rows are in host memory
    num_host_loads: int = 0  # pages whose rows came back from there
    num_step_tokens: int = 0  # that steps computed, all together
    step_sizes: tuple[int, ...] = ()
    drafts: DraftStats | None = None
    selection: SelectionStats | None = None


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """Settings and headers were checked and fit; weights are read next."""

    plan: StartPlan


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The checkpoint was read and verified; the warm-up pass comes next."""

    info: EngineInfo


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A real forward pass through prefill and decode has succeeded."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that one step produced, in one message."""

    outputs: list[RequestOutput]
    stats: EngineStats


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent while idle, so that silence means a hang."""

    stats: EngineStats


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What became of a Question; answers come in the order of the questions.

    `num_tokens` were saved or restored; `error` says, for the one who asked, why
    none were. `file` is the name of the one that was written, in a folder that the operator knows.
    """

    done: bool
    num_tokens: int = 0
    error: str = ""
    file: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start or cannot go on; `message` is one line for the operator.

    is_setting: what is wrong is a setting, not the checkpoint or the machine.
    """

    message: str
    is_setting: bool = False


Event = Planned | Loaded | Ready | Outputs | Heartbeat | Answer | Failed
