"""What goes into a step and what comes out of it, per request: plain values, without torch.

The scheduler builds and reads these, so it runs and is tested without a tensor library.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..configs.logprobs import TokenLogprobs
from ..configs.sampling import SamplingParams

NON_FINITE = "the model produced non-finite logits for this request"


@dataclass(slots=True)
class SampleInput:
    """What the sampler knows of a request: its settings and the tokens so far."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]

    @property
    def position(self) -> int:
        """Position of the token about to be chosen."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(slots=True)
class SequenceInput:
    """One request's part of a step.

    token_ids: the tokens computed now, a prompt chunk or one decode token.
    context_len: tokens of the request cached before this step.
    pages: its block table, reaching at least context_len + len(token_ids).
    sample: None for a prompt chunk that is not the last.
    prompt_targets: where prompt logprobs are wanted, the prompt token that follows each row; the
        row that samples has none, so there may be one fewer than rows.
    """

    token_ids: Sequence[int]
    context_len: int
    pages: Sequence[int]
    sample: SampleInput | None
    prompt_targets: Sequence[int] = ()
    num_prompt_logprobs: int = 0


@dataclass(slots=True)
class SequenceOutput:
    """The sampled token, if one was asked for, and the scores asked for."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
