"""A request's states and tokens: no transition but the legal ones, no phase by guessing."""

import itertools

import pytest

from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.block_table import BlockTable
from minidsa.scheduler.messages import Submit, TokenLogprobs
from minidsa.scheduler.request import IllegalTransition, Phase, Rank, Request, State

MOVES = ("admit", "preempt", "finish")
LEGAL = {
    (State.WAITING, "admit"): State.RUNNING,
    (State.WAITING, "finish"): State.FINISHED,
    (State.RUNNING, "preempt"): State.PREEMPTED,
    (State.RUNNING, "finish"): State.FINISHED,
    (State.PREEMPTED, "admit"): State.RUNNING,
    (State.PREEMPTED, "finish"): State.FINISHED,
}


def make(prompt=(1, 2, 3), **params):
    submit = Submit("r", list(prompt), SamplingParams(max_tokens=8, seed=0, **params))
    return Request(submit, Rank(1, 1, 1), BlockTable(4))


def move(request, name):
    {
        "admit": lambda: request.admit(0),
        "preempt": request.preempt,
        "finish": lambda: request.finish("stop"),
    }[name]()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_only_legal_transitions_happen(length):
    for moves in itertools.product(MOVES, repeat=length):
        request = make()
        for name in moves:
            before = request.state
            if (before, name) in LEGAL:
                move(request, name)
                assert request.state is LEGAL[before, name]
            else:
                with pytest.raises(IllegalTransition, match=f"request r: {before.value} to"):
                    move(request, name)
                assert request.state is before


@pytest.mark.parametrize("outputs", [0, 1, 5])
def test_sch_02_phase_is_explicit_after_preemption(outputs):
    request = make()
    request.admit(0)
    for token in range(outputs):
        request.num_computed = request.num_tokens
        request.take(token, 1000)
        assert request.phase is Phase.DECODE
    request.preempt()
    assert request.phase is Phase.EXTEND and request.num_computed == 0
    assert request.output_ids == list(range(outputs))
    request.admit(0)
    assert request.phase is Phase.EXTEND
    assert request.tokens(0, request.num_tokens) == [1, 2, 3, *range(outputs)]


def test_cached_tokens_are_those_of_the_first_start():
    request = make(range(10))
    assert request.num_cached is None
    request.admit(4)
    assert (request.num_cached, request.num_computed) == (4, 4)
    request.preempt()
    request.admit(8)
    assert (request.num_cached, request.num_computed) == (4, 8)


def test_tokens_cross_from_prompt_to_outputs():
    request = make((10, 11, 12))
    request.admit(0)
    for token in (20, 21, 22):
        request.take(token, 1000)
    everything = [10, 11, 12, 20, 21, 22]
    for start in range(7):
        for stop in range(start, 7):
            assert list(request.tokens(start, stop)) == everything[start:stop]


def test_prompt_scores_start_over_with_the_prompt_but_never_after_they_were_sent():
    entry = TokenLogprobs(-1.0, 1, [], [])
    request = make(prompt_logprobs=0)
    request.admit(0)
    request.prompt_scores.append(entry)
    request.preempt()
    assert request.prompt_scores == [] and request.wants_prompt_scores
    request.admit(0)
    request.prompt_scores += [entry, entry]
    request.take(5, 1000)
    request.preempt()
    assert request.prompt_scores == [entry, entry] and not request.wants_prompt_scores
    assert not make().wants_prompt_scores


def test_finish_reason_is_kept():
    request = make()
    assert request.finish_reason is None
    request.finish("abort")
    assert request.finish_reason == "abort"
