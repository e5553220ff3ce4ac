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
    request, params = work.request, work.request.params
    start, num_known = work.start, work.num_tokens - len(work.draft_ids)
    sample = None
    if work.samples:
        sample = SampleInput(params, request.prompt_ids, request.output_ids, request.matcher)
    return SequenceInput(
        token_ids=[*request.tokens(start, start + num_known), *work.draft_ids],
        context_len=start,
        pages=request.table.pages,
        sample=sample,
        num_drafts=len(work.draft_ids),
        num_to_draft=work.num_to_draft,
        following_ids=request.tokens(start + 1, start + num_known + 1),
        num_prompt_logprobs=params.prompt_logprobs if request.wants_prompt_scores else None,
        attention=params.attention,
    )
