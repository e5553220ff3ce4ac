"""What goes into a step and what comes out of it, per request: plain values, without torch.

The scheduler builds and reads these, so it runs and is tested without a tensor library.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..configs.logprobs import TokenLogprobs
from ..configs.sampling import AttentionRule, SamplingParams

# Prompt rows are scored in tiles, so a long chunk never needs [chunk, vocabulary] in one piece.
PROMPT_ROWS_AT_ONCE = 128
NON_FINITE = "the model produced non-finite logits for this request"


class Constraint(Protocol):
    """Says which ids may be chosen at one position."""

    def mask(self) -> bytes:
        """One bit an id, lowest bit first, in whole bytes; at least one bit is set."""
        ...

    def after(self, draft_ids: Sequence[int]) -> "Constraint":
        """The same behind tokens that may turn out not to be chosen."""
        ...


@dataclass(slots=True)
class SampleInput:
    """What the sampler knows of a request: its settings and the tokens so far.

    output_ids and constraint are the request's own and go on with it: they are read when the token
    is chosen, which a step that was started ahead does later.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    constraint: Constraint | None = None

    @property
    def position(self) -> int:
        """Position of the token about to be chosen."""
        return len(self.prompt_ids) + len(self.output_ids)

    def after(self, draft_ids: Sequence[int]) -> "SampleInput":
        """The same request had these tokens been chosen: what its later rows are sampled with."""
        if not draft_ids:
            return self
        constraint = None if self.constraint is None else self.constraint.after(draft_ids)
        return SampleInput(self.params, self.prompt_ids, [*self.output_ids, *draft_ids], constraint)

    @property
    def is_plain(self) -> bool:
        """Whether the model's own distribution is what the next token is chosen from."""
        p = self.params
        penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
        ruled = self.constraint is not None or self.forced_token is not None
        return not (penalised or p.logit_bias or len(self.output_ids) < p.min_tokens or ruled)

    @property
    def is_greedy(self) -> bool:
        """Whether this row, and any behind it, takes the token that the head finds likeliest.

        Nothing but that token is asked for, so nobody needs the logits.
        """
        p = self.params
        is_alone = p.logprobs is None and p.thinking_budget is None
        return p.temperature == 0 and is_alone and self.is_plain

    @property
    def forced_token(self) -> int | None:
        """The only token that may come next: the end of thoughts that have used up their budget."""
        budget, end = self.params.thinking_budget, self.params.end_think_id
        if budget is None or len(self.output_ids) < budget or end in self.output_ids:
            return None
        return end


@dataclass(slots=True)
class SequenceInput:
    """One request's part of a step.

    token_ids: the tokens computed now: a prompt chunk, or the newest token and drafts behind it.
    context_len: tokens of the request cached before this step.
    pages: its block table, reaching at least context_len + len(token_ids) + num_to_draft - 1.
    sample: None for a prompt chunk that is not the last.
    num_drafts: how many of the last token_ids are drafts; a token is sampled in each of their rows
        and in the row before them.
    num_to_draft: tokens to propose for the next step, 0 for none.
    following_ids: the known token that follows each row, the sampled ones left out.
    num_prompt_logprobs: alternatives to report beside each of following_ids; None: report nothing.
    attention: what its tokens attend to; None: as the model was made.
    follows: the place of the same request in the step before, where the only token of this part is
        what is sampled there; token_ids holds any token instead. None: all tokens are known.
    """

    token_ids: Sequence[int]
    context_len: int
    pages: Sequence[int]
    sample: SampleInput | None
    num_drafts: int = 0
    num_to_draft: int = 0
    following_ids: Sequence[int] = ()
    num_prompt_logprobs: int | None = None
    attention: AttentionRule | None = None
    follows: int | None = None

    @property
    def is_decode(self) -> bool:
        """Whether a token behind one is all it asks for, under the model's own attention."""
        is_one = len(self.token_ids) == 1 and self.sample is not None and not self.num_to_draft
        return is_one and self.attention is None and self.num_prompt_logprobs is None

    @property
    def draft_ids(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(slots=True)
class SequenceOutput:
    """The tokens a step adds to a request, with the scores asked for.

    token_ids: those sampled in consecutive rows, up to the first that differs from the draft of its
        place; without drafts one or, where nothing was to be sampled, none. logprobs runs parallel
        or is empty. draft_ids: proposals for what comes next.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    error: str | None = None


class Started(Protocol):
    """A step whose layers were given to the device; `choose`, then `outputs`.

    leads: whether the next step may be started once this one's tokens are being chosen, before they
        are known.
    """

    @property
    def leads(self) -> bool: ...

    def choose(self, wanted: Sequence[bool]) -> None:
        """Give the choice of its tokens to the device, waiting for nothing.

        All tokens before them are known now. wanted: of each sequence, whether its request still
        goes on; nothing is asked about one that does not.
        """
        ...

    def outputs(self) -> Sequence[SequenceOutput]:
        """One for each sequence, in their order; waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that was over when it had been started."""

    results: Sequence[SequenceOutput]
    leads: bool = False

    def choose(self, wanted: Sequence[bool]) -> None:
        """Its tokens are there already."""

    def outputs(self) -> Sequence[SequenceOutput]:
        return self.results


def num_accepted(draft_ids: Sequence[int], sampled_ids: Sequence[int]) -> int:
    """Drafts that are what was sampled in their place, up to the first that is not.

    A token is drawn in every row as if the drafts before it were its history, from a number that
    depends on seed and position alone. The accepted ones and the one behind them are therefore the
    tokens that steps of one token would have drawn, at any temperature.
    """
    for count, (draft, sampled) in enumerate(zip(draft_ids, sampled_ids, strict=False)):
        if draft != sampled:
            return count
    return len(draft_ids)
