"""A device that computes as late as it may: when somebody waits, whatever the books say by then.

Pages of a request that has ended have other owners by the time its surplus row is written. So rows
of free pages stay as they are here, and what counts is that everybody's tokens are right.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minidsa.kv_cache.cache import KvCache
from minidsa.model.replayed_step import NOBODY
from minidsa.model.sequence import (
    Constraint,
    SampleInput,
    SequenceInput,
    SequenceOutput,
    Started,
)
from runners import Computes, with_token
from scheduler_fakes import FakeRunner


class PlainRunner(FakeRunner):
    """Keeps what a page held when it is freed."""

    def cache(self) -> KvCache:
        return KvCache(len(self.slots) // self.page_size - 1, self.page_size)


@dataclass
class Known:
    """What a grammar allowed when it was asked."""

    bits: bytes

    def mask(self) -> bytes:
        return self.bits

    def after(self, draft_ids: Sequence[int]) -> Constraint:
        raise AssertionError("nothing is drafted here")


@dataclass
class LateStep:
    """Its inputs as they were when it was started, what its tokens are chosen by as that was when
    they were, and its results once they were waited for.
    """

    device: "LateDevice"
    sequences: list[SequenceInput]
    num_extends: int
    behind: Started | None
    leads: bool
    is_chosen: bool = False
    results: Sequence[SequenceOutput] | None = None

    def choose(self, wanted: Sequence[bool]) -> None:
        assert not self.is_chosen
        self.sequences = [
            replace(sequence, sample=sequence.sample and as_now(sequence.sample, is_wanted))
            for sequence, is_wanted in zip(self.sequences, wanted, strict=True)
        ]
        self.is_chosen = True

    def outputs(self) -> Sequence[SequenceOutput]:
        while self.results is None:
            self.device.advance()
        return self.results


def as_now(sample: SampleInput, is_wanted: bool) -> SampleInput:
    """What a token is chosen by, as the host knows it now."""
    if not is_wanted:
        return NOBODY
    constraint = None if sample.constraint is None else Known(sample.constraint.mask())
    return SampleInput(sample.params, sample.prompt_ids, list(sample.output_ids), constraint)


@dataclass
class LateDevice:
    """Steps in the order in which they were given; those of plain decodes lead.

    num_ahead: steps that were started behind one that was not waited for.
    """

    runner: Computes
    num_ahead: int = 0
    given: deque[LateStep] = field(default_factory=deque)

    def start(
        self, sequences: Sequence[SequenceInput], num_extends: int, behind: Started | None = None
    ) -> Started:
        self.num_ahead += behind is not None
        leads = not num_extends and all(sequence.is_decode for sequence in sequences)
        kept = [replace(sequence, pages=list(sequence.pages)) for sequence in sequences]
        step = LateStep(self, kept, num_extends, behind, leads)
        self.given.append(step)
        return step

    def advance(self) -> None:
        """Compute the oldest step."""
        step = self.given.popleft()
        sequences = step.sequences
        if (behind := step.behind) is not None:
            sequences = [with_token(sequence, behind) for sequence in sequences]
        if not step.is_chosen:
            # All its requests had ended: its rows are written, and that is all.
            sequences = [replace(sequence, sample=None) for sequence in sequences]
        step.results = self.runner.run(sequences, step.num_extends)
