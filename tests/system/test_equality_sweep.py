"""Ids and logprobs of a request are its own to the last bit: random settings, near-tied logits.

The heads of the beds hold pairs of rows one ulp apart, so that a wrong last bit anywhere in the
model changes ids as well. The long run is `make sweep`.
"""

import functools
import random

import pytest
import torch

import model_driver
from checkpoints import NAN_TOKEN, t_nan, t_tied
from equality import BEDS, Sweep, bits, random_request
from minidsa.model.checkpoint import read_config
from minidsa.model.loader import load_model
from minidsa.scheduler.messages import Submit
from model_driver import Answers, ModelDriver, Settings
from scheduler_fakes import submit


@pytest.mark.slow
@pytest.mark.parametrize("bed", BEDS)
def test_num_17_every_answer_is_its_own_in_a_few_settings(bed):
    sweep = Sweep(BEDS[bed](), num_requests=20)
    assert [found for seed in range(6) if (found := sweep.difference(seed))] == []
    assert sweep.met["cached tokens"] > 0


def test_num_17_the_sweep_notices_a_last_bit(monkeypatch):
    """Without packed weights the rows of a product have other bits alone than together."""

    def unpacked(folder, *, with_mtp: bool = False):
        return load_model(
            folder, read_config(folder), torch.float32, torch.device("cpu"), with_mtp=with_mtp
        )

    monkeypatch.setattr(model_driver, "model_of", functools.cache(unpacked))
    sweep = Sweep(t_tied(), num_requests=20)
    assert any(sweep.difference(seed) for seed in range(6))


@pytest.mark.slow
def test_num_12_twenty_identical_requests_alone_and_among_traffic():
    prompt = [80 + (7 * i) % 400 for i in range(41)]

    def copies() -> list[Submit]:
        return [submit(f"same{i}", prompt, 12, logprobs=3, prompt_logprobs=1) for i in range(20)]

    quiet, answers = ModelDriver(t_tied(), Settings(budget=300)), []
    for command in copies():
        answers.append(answer(quiet.run([command]), command))
    rng = random.Random(12)
    requests = [*copies(), *(random_request(number) for number in range(30))]
    rng.shuffle(requests)
    busy = ModelDriver(t_tied(), Settings(budget=37, seats=16, preempt_every=5))
    arrive = {i: rng.randrange(40) for i in range(len(requests))}
    found = busy.run(requests, arrive)
    answers += [answer(found, command) for command in copies()]
    assert len(answers) == 40
    assert all(other == answers[0] for other in answers)


def answer(answers: Answers, command: Submit) -> tuple[list[int], list[tuple]]:
    return answers.ids[command.request_id], bits(answers.logprobs[command.request_id])


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("budget", [64, 5])
def test_num_20_prompt_scores_that_are_no_numbers_end_in_an_error(max_tokens, budget):
    """Also where nothing is to be generated, so that no sampled row would show it."""
    prompt = [80, 81, 82, 83, NAN_TOKEN, 84, 85, 86]
    bad = submit("bad", prompt, max_tokens, prompt_logprobs=1)
    good = submit("good", prompt[:4], max_tokens, prompt_logprobs=1)
    answers = ModelDriver(t_nan(), Settings(budget=budget)).run([bad, good])
    assert answers.ends["bad"].finish_reason == "error"
    assert "non-finite" in (answers.ends["bad"].error or "")
    assert answers.ends["good"].finish_reason == "length"
    assert len(answers.logprobs["good"]) == 3
