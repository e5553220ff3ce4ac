"""From a step to the runner's inputs: the scheduler's lists in the shape the model wants."""

from collections.abc import Sequence
from typing import Protocol

from ..model.sequence import SampleInput, SequenceInput, SequenceOutput
from .batch import Step, Work


class Runner(Protocol):
    """Computes one step; `model.runner.ModelRunner`, or a wrapper of it."""

    def run(
        self, sequences: Sequence[SequenceInput], num_extends: int
    ) -> Sequence[SequenceOutput]: ...


def launch(runner: Runner, step: Step) -> Sequence[SequenceOutput]:
    """Run one step; returns one output for each of its works, in their order."""
    outputs = runner.run([_sequence(work) for work in step.work], step.num_extends)
    if len(outputs) != len(step.work):
        raise RuntimeError(f"the runner returned {len(outputs)} outputs for {len(step.work)} works")
    return outputs


def _sequence(work: Work) -> SequenceInput:
    request, start, num_tokens, samples = work
    stop = start + num_tokens
    params = request.params
    sample = SampleInput(params, request.prompt_ids, request.output_ids) if samples else None
    targets: Sequence[int] = ()
    if request.wants_prompt_scores:
        targets = request.prompt_ids[start + 1 : stop + 1]
    return SequenceInput(
        token_ids=request.tokens(start, stop),
        context_len=start,
        pages=request.table.pages,
        sample=sample,
        prompt_targets=targets,
        num_prompt_logprobs=params.prompt_logprobs or 0,
    )
