"""A device that computes as late as it may: when somebody waits, whatever the books say by then.

Pages of a request that has ended have other owners by the time its surplus row is written. So rows
of free pages stay as they are here, and what counts is that everybody's tokens are right.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minidsa.kv_cache.cache import KvCache
from minidsa.model.sequence import SequenceInput, SequenceOutput, Started
from runners import Computes, following
from scheduler_fakes import FakeRunner


class PlainRunner(FakeRunner):
    """Keeps what a page held when it is freed."""

    def cache(self) -> KvCache:
        return KvCache(len(self.slots) // self.page_size - 1, self.page_size)


@dataclass
class LateStep:
    """Its inputs as they were when it was started, and its results once they were waited for."""

    device: "LateDevice"
    sequences: list[SequenceInput]
    num_extends: int
    behind: Started | None
    leads: bool
    results: Sequence[SequenceOutput] | None = None

    def outputs(self) -> Sequence[SequenceOutput]:
        while self.results is None:
            self.device.advance()
        return self.results


@dataclass
class LateDevice:
    """Steps in the order in which they were given; those of bare decodes lead.

    num_ahead: steps that were started behind one that was not waited for.
    """

    runner: Computes
    num_ahead: int = 0
    given: deque[LateStep] = field(default_factory=deque)

    def start(
        self, sequences: Sequence[SequenceInput], num_extends: int, behind: Started | None = None
    ) -> Started:
        self.num_ahead += behind is not None
        leads = not num_extends and all(sequence.is_bare_decode for sequence in sequences)
        kept = [replace(sequence, pages=list(sequence.pages)) for sequence in sequences]
        step = LateStep(self, kept, num_extends, behind, leads)
        self.given.append(step)
        if not leads:
            step.outputs()
        return step

    def advance(self) -> None:
        """Compute the oldest step."""
        step = self.given.popleft()
        sequences = step.sequences
        if (behind := step.behind) is not None:
            sequences = [following(sequence, behind) for sequence in sequences]
        step.results = self.runner.run(sequences, step.num_extends)
