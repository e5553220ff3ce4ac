"""From a step to the runner's inputs: the scheduler's lists in the shape the model wants."""

from collections.abc import Sequence
from typing import Protocol

from ..model.sequence import SampleInput, SequenceInput, SequenceOutput, Started
from .batch import Step, Work
from .request import State


class Runner(Protocol):
    """Computes steps; `model.runner.ModelRunner`, or a wrapper of it."""

    def start(
        self, sequences: Sequence[SequenceInput], num_extends: int, behind: Started | None = None
    ) -> Started:
        """Give the layers of a step to the device; behind: the one before, which leads."""
        ...


def start(runner: Runner, step: Step, behind: Started | None = None) -> Started:
    """Start a step. behind: the one before, where the tokens of `step` are not known yet."""
    sequences = [_sequence(work, behind is not None) for work in step.work]
    return runner.start(sequences, step.num_extends, behind)


def choose(started: Started, step: Step) -> None:
    """Have the tokens of a step chosen; all before them must be booked."""
    started.choose([work.request.state is State.RUNNING for work in step.work])


def finish(started: Started, step: Step) -> Sequence[SequenceOutput]:
    """Wait for a step; returns one output for each of its works, in their order."""
    outputs = started.outputs()
    if len(outputs) != len(step.work):
        raise RuntimeError(f"the runner returned {len(outputs)} outputs for {len(step.work)} works")
    return outputs


def launch(runner: Runner, step: Step) -> Sequence[SequenceOutput]:
    """Compute one step; returns one output for each of its works, in their order."""
    started = start(runner, step)
    choose(started, step)
    return finish(started, step)


def _sequence(work: Work, is_ahead: bool) -> SequenceInput:
    request, params = work.request, work.request.params
    first, num_known = work.start, work.num_tokens - len(work.draft_ids)
    sample = None
    if work.samples:
        sample = SampleInput(params, request.prompt_ids, request.output_ids, request.matcher)
    return SequenceInput(
        token_ids=(
            [0] if is_ahead else [*request.tokens(first, first + num_known), *work.draft_ids]
        ),
        context_len=first,
        pages=request.table.pages,
        sample=sample,
        num_drafts=len(work.draft_ids),
        num_to_draft=work.num_to_draft,
        following_ids=request.tokens(first + 1, first + num_known + 1),
        num_prompt_logprobs=params.prompt_logprobs if request.wants_prompt_scores else None,
        attention=params.attention,
        follows=work.follows if is_ahead else None,
    )
