"""Runners around runners: what a device does late, or ahead of the host, done at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from minidsa.model.sequence import Computed, SequenceInput, SequenceOutput, Started


class AtOnce:
    """Makes a runner of a class that has `run`."""

    def run(self, sequences: Sequence[SequenceInput], num_extends: int) -> list[SequenceOutput]:
        raise NotImplementedError

    def start(
        self, sequences: Sequence[SequenceInput], num_extends: int, behind: Started | None = None
    ) -> Started:
        assert behind is None, "nothing led"
        return Computed(self.run(sequences, num_extends))


class Computes(Protocol):
    def run(
        self, sequences: Sequence[SequenceInput], num_extends: int
    ) -> Sequence[SequenceOutput]: ...


@dataclass
class Leading:
    """Lets every step of plain decodes lead, as replayed steps do on a GPU.

    A step is computed when it is started, and its outputs are handed out when they are asked for.
    What follows is told by its place alone, here as on the device. is_on: False lets none lead.
    num_ahead: steps that were started before the tokens in front of them were handed out.
    """

    runner: Computes
    is_on: bool = True
    num_ahead: int = 0

    def start(
        self, sequences: Sequence[SequenceInput], num_extends: int, behind: Started | None = None
    ) -> Started:
        if behind is not None:
            self.num_ahead += 1
            sequences = [following(sequence, behind) for sequence in sequences]
        outputs = self.runner.run(sequences, num_extends)
        decodes = (
            self.is_on and not num_extends and all(sequence.is_decode for sequence in sequences)
        )
        return Computed(outputs, leads=decodes)


def following(sequence: SequenceInput, behind: Started) -> SequenceInput:
    """The same with its token; one that does not exist is 0."""
    sequence = with_token(sequence, behind)
    assert sequence.sample is not None
    return replace(sequence, sample=sequence.sample.after(sequence.token_ids))


def with_token(sequence: SequenceInput, behind: Started) -> SequenceInput:
    """The same with its token, sampled with what is known by then."""
    assert sequence.follows is not None and list(sequence.token_ids) == [0]
    assert not sequence.num_drafts and not sequence.following_ids
    ids = behind.outputs()[sequence.follows].token_ids or [0]
    return replace(sequence, token_ids=ids, follows=None)
