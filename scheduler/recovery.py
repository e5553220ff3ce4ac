"""What becomes of a step whose computation raised: whose fault was it?

First the engine itself is tried, with one token that belongs to nobody. If that fails as well,
nothing can be computed any more and the engine is broken. Otherwise the step is computed again in
halves, down to single requests, so that only those that fail alone end with an error; a request
that fails costs its mates a few short steps, however often its client repeats it.

Computing a part of a step again is safe: the same rows go to the same slots, and a draw depends on
seed and position alone.
"""

import logging
from collections.abc import Callable

from ..configs.sampling import SamplingParams
from ..model.sequence import SampleInput, SequenceInput, SequenceOutput
from .batch import Step
from .launch import Runner, launch

REQUEST_FAILED = "the engine failed to compute this request"

_log = logging.getLogger(__name__)


class EngineBroken(RuntimeError):
    """The engine cannot go on; the text is for the operator."""


def recover(runner: Runner, step: Step, restart: Callable[[], None]) -> list[SequenceOutput]:
    """One output for each work of a failed step, an error for those that fail alone.

    restart: called before each computation, which may take as long as a step.
    Raises EngineBroken if not even one token can be computed.
    """
    restart()
    try:
        _probe(runner)
    except Exception as error:
        _log.exception("a probe of one token failed too")
        raise EngineBroken(
            f"a step failed, and so did a probe of one token, with {error!r}"
        ) from error
    return _by_halves(runner, step, restart)


def _probe(runner: Runner) -> None:
    """Compute one token from nothing; its rows go to page 0, where padding writes."""
    sample = SampleInput(SamplingParams(max_tokens=1, seed=0, temperature=0.0), [0], [])
    started = runner.start([SequenceInput([0], context_len=0, pages=[0], sample=sample)], 1)
    started.choose([True])
    started.outputs()


def _by_halves(runner: Runner, step: Step, restart: Callable[[], None]) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    for half in step.halves():
        restart()
        try:
            outputs += launch(runner, half)
        except Exception as error:
            if len(half.work) > 1:
                outputs += _by_halves(runner, half, restart)
            else:
                _log.error("request %s fails alone: %r", half.work[0].request.request_id, error)
                outputs.append(SequenceOutput(error=REQUEST_FAILED))
    return outputs
