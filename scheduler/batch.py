"""A step: which requests compute how many tokens together.

A prompt chunk and a decode token differ only in how many tokens they bring and in whether they want
a token sampled, so one list describes any mixture of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .request import Request


class Work(NamedTuple):
    """One request's part of a step: its tokens start..start+num_tokens-1.

    `samples` says whether the last of them is the request's newest token, so that the next one is
    chosen from its logits.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Extends first, decodes after; false when there is nothing to compute."""

    work: list[Work]
    num_extends: int

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)

    def __bool__(self) -> bool:
        return bool(self.work)


class Score(Protocol):
    """A token's log-probability as the model reports it; see messages.TokenLogprobs."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top_ids(self) -> list[int]: ...
    @property
    def top_logprobs(self) -> list[float]: ...


class Result(Protocol):
    """What the runner returns for one `Work`; the scheduler needs no tensor library to read it."""

    @property
    def token_id(self) -> int | None: ...
    @property
    def logprobs(self) -> Score | None: ...
    @property
    def prompt_logprobs(self) -> Sequence[Score]: ...
    @property
    def error(self) -> str | None: ...
