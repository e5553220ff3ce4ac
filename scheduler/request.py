"""One request inside the engine: its tokens, its pages and where it stands.

State and phase are explicit. What a request may do next is never guessed from what it happens to
hold: a preempted request has outputs and yet must be computed from its first token again.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from ..configs.logprobs import TokenLogprobs
from ..kv_cache.block_table import BlockTable
from .grammar import Matcher
from .messages import FinishReason, Submit


class State(enum.Enum):
    """Where a request stands; each has exactly one state and ends in FINISHED once."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Phase(enum.Enum):
    """What a running request computes: known tokens in chunks, or its newest token."""

    EXTEND = "extend"
    DECODE = "decode"


# Asked for every request and step, and an attribute of an enum takes long to find.
EXTEND, DECODE = Phase


_TRANSITIONS = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.RUNNING, State.PREEMPTED),
        (State.PREEMPTED, State.RUNNING),
        (State.WAITING, State.FINISHED),
        (State.RUNNING, State.FINISHED),
        (State.PREEMPTED, State.FINISHED),
    }
)


class IllegalTransition(RuntimeError):
    """The books are wrong: a request was moved to a state it cannot reach from where it is."""


class Rank(NamedTuple):
    """Where a request stands among the others, see `policy`: the smallest goes first.

    `arrival` tells apart those of equal place; `turn` is the place without the priority.
    """

    place: int
    arrival: int
    turn: int


class Request:
    """Prompt and outputs, how far they are computed, and the pages that hold their rows.

    `rank` orders requests, `since_step` is the step at which they came. `num_tokens` counts prompt
    and outputs. Of those tokens the first `num_computed` are in the cache; the newest output never
    is before it was computed itself. `num_cached` prompt tokens were there already when the request
    first ran; None before that. It came at `arrived` and waited `queue_seconds` for its first step.
    `draft_ids` are the model's guesses at what follows the newest output. `matcher` stands behind
    the newest output, also through preemptions, which forget no tokens.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "draft_ids",
        "finish_reason",
        "matcher",
        "num_cached",
        "num_computed",
        "num_tokens",
        "output_ids",
        "params",
        "phase",
        "prompt_ids",
        "prompt_scores",
        "queue_seconds",
        "rank",
        "request_id",
        "since_step",
        "state",
        "table",
    )

    def __init__(
        self,
        submit: Submit,
        rank: Rank,
        table: BlockTable,
        since_step: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = submit.request_id
        self.prompt_ids: Sequence[int] = submit.prompt_ids
        self.params = submit.params
        self.rank = rank
        self.since_step = since_step
        self.matcher = matcher
        self.state = State.WAITING
        self.phase = Phase.EXTEND
        self.output_ids: list[int] = []
        self.num_tokens = len(submit.prompt_ids)
        self.num_computed = 0
        self.draft_ids: list[int] = []
        self.num_cached: int | None = None
        self.arrived = 0.0
        self.queue_seconds: float | None = None
        self.table = table
        self.prompt_scores: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None

    @property
    def wants_prompt_scores(self) -> bool:
        """Prompt logprobs leave with the first token; recomputing the prompt does not repeat them.

        A request that asks for no tokens at all finishes when its scores are complete.
        """
        return self.params.prompt_logprobs is not None and not self.output_ids

    @property
    def has_run(self) -> bool:
        """Whether it was ever started; a preempted request was."""
        return self.num_cached is not None

    @property
    def newest(self) -> Sequence[int]:
        """The last token, as a list of one."""
        return self.tokens(self.num_tokens - 1, self.num_tokens)

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Tokens start..stop-1 of prompt and outputs together."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        outputs = self.output_ids[max(start - split, 0) : stop - split]
        return [*self.prompt_ids[start:], *outputs] if start < split else outputs

    def admit(self, num_cached: int) -> None:
        """Start, or start again after a preemption: all tokens behind the cached are computed."""
        self._move(State.RUNNING)
        self.num_computed = num_cached
        if self.num_cached is None:
            self.num_cached = num_cached

    def preempt(self) -> None:
        """Lose the pages, which the caller takes, and with them every computed row."""
        self._move(State.PREEMPTED)
        self.phase = Phase.EXTEND
        self.num_computed = 0
        self.draft_ids = []
        if self.wants_prompt_scores:
            self.prompt_scores.clear()

    def finish(self, reason: FinishReason) -> None:
        """End for good; the caller takes the pages."""
        self._move(State.FINISHED)
        self.finish_reason = reason

    def take(self, token_id: int, max_tokens: int) -> FinishReason | None:
        """Append a sampled token; from here on the request decodes. Says why it ends, if it does.

        Its grammar takes the token unless that is a stop. max_tokens: prompt and outputs together
        that there is room for.
        """
        self.output_ids.append(token_id)
        self.num_tokens += 1
        self.phase = DECODE
        params, count = self.params, len(self.output_ids)
        if token_id in params.stop_token_ids and count > params.min_tokens:
            return "stop"
        if self.matcher is not None:
            self.matcher.accept([token_id])
            if self.matcher.is_complete:
                return "complete"
        return "length" if self.ends_with(0, max_tokens) else None

    def ends_with(self, count: int, max_tokens: int) -> bool:
        """Whether it is over by length with `count` more outputs; max_tokens: as in `take`."""
        num_outputs = len(self.output_ids) + count
        return num_outputs >= self.params.max_tokens or self.num_tokens + count >= max_tokens

    def _move(self, state: State) -> None:
        if (self.state, state) not in _TRANSITIONS:
            raise IllegalTransition(
                f"request {self.request_id}: {self.state.value} to {state.value}"
            )
        self.state = state
