"""Drafts under a real model: every feature gives the tokens and scores that it gives without.

The ordinary bed's random MTP layer is almost never right, t_markov's always; an oracle is right as
often as a test wants it to be.
"""

import dataclasses
import random

import pytest

from checkpoints import EOS_IDS, t_cpu, t_eos, t_markov, t_tied
from minidsa.scheduler.messages import Submit
from minidsa.scheduler.request import Request
from minidsa.scheduler.speculative import Speculation
from model_driver import Answers, ModelDriver, Settings, model_of
from scheduler_fakes import submit

FEATURES = {
    "plain": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_k": 5, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "bias": {"logit_bias": {7: 4.0, 9: -100.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(EOS_IDS)},
    "stops": {"stop_token_ids": list(EOS_IDS)},
    "thinking_budget": {"thinking_budget": 4, "end_think_id": 70},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"logprobs": 0, "prompt_logprobs": 2},
}
LENGTHS = (1, 9, 15, 16, 17, 33, 64)


def with_fields(command: Submit, **fields) -> Submit:
    known = {f: getattr(command.params, f) for f in command.params.__struct_fields__}
    params = type(command.params)(**known | fields)
    return Submit(command.request_id, command.prompt_ids, params)


def requests(feature: str, seed: int = 0) -> list[Submit]:
    rng = random.Random(seed)
    submits = []
    for i, length in enumerate(LENGTHS):
        prompt = [rng.randrange(80, 512) for _ in range(length)]
        command = submit(f"r{i}", prompt, rng.choice([5, 12, 20]))
        submits.append(with_fields(command, seed=i, **FEATURES[feature]))
    return submits


class Replay:
    """Drafts from the answers of another run; `miss` spoils every third token."""

    def __init__(self, answers: Answers, miss: bool) -> None:
        self.answers, self.miss = answers, miss

    def propose(self, request: Request, most: int) -> list[int]:
        done = len(request.output_ids)
        right = self.answers.ids[request.request_id][done : done + most]
        return [t ^ 1 if self.miss and (done + i) % 3 == 2 else t for i, t in enumerate(right)]


def replaying(folder, settings: Settings, answers: Answers, miss: bool) -> ModelDriver:
    drafter = Replay(answers, miss)
    speculation = Speculation(drafter, 3, from_model=False, adaptive=False)
    return ModelDriver(folder, settings, speculation)


def assert_same(found: Answers, plain: Answers, *, exact: bool = False) -> None:
    assert found.ids == plain.ids
    assert {r: e.finish_reason for r, e in found.ends.items()} == {
        r: e.finish_reason for r, e in plain.ends.items()
    }
    for request_id, scores in plain.logprobs.items():
        others = found.logprobs[request_id]
        assert len(others) == len(scores)
        for mine, other in zip(scores, others, strict=True):
            assert other.logprob == pytest.approx(mine.logprob, abs=0 if exact else 1e-5)
            assert other.top_ids == mine.top_ids


@pytest.mark.parametrize("feature", FEATURES)
def test_spec_10_spec_11_every_feature_is_as_without_drafts(feature):
    folder = t_eos() if "stop" in feature or feature == "min_tokens" else t_cpu()
    plain = ModelDriver(folder, Settings()).run(requests(feature))
    for miss in (False, True):
        drafted = replaying(folder, Settings(), plain, miss).run(requests(feature))
        assert_same(drafted, plain)
        assert drafted.num_accepted > 40
        assert (drafted.num_accepted < drafted.num_drafted) or not miss
    for settings in (
        Settings(drafter="mtp", num_drafts=1),
        Settings(drafter="mtp", num_drafts=4),
        Settings(drafter="ngram", num_drafts=3),
    ):
        assert_same(ModelDriver(folder, settings).run(requests(feature)), plain)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(page_size=3, budget=40),
        Settings(pages=16, budget=64),
        Settings(preempt_every=3, seats=4),
        Settings(budget=9, seats=3, page_size=4),
        Settings(max_model_len=66),
    ],
)
def test_spec_13_pages_chunks_and_preemption(settings):
    greedy = [Submit(f"g{c.request_id}", c.prompt_ids, c.params) for c in requests("plain", 2)]
    submits = requests("sampled", 1) + greedy
    plain = ModelDriver(t_cpu(), settings).run(submits)
    drafted = replaying(t_cpu(), settings, plain, miss=True).run(submits)
    assert_same(drafted, plain)
    mtp = dataclasses.replace(settings, drafter="mtp", num_drafts=3)
    assert_same(ModelDriver(t_cpu(), mtp).run(submits), plain)


@pytest.mark.parametrize("count", range(1, 8))
def test_spec_01_an_exact_layer_is_accepted_at_every_position(count):
    plain = ModelDriver(t_markov(), Settings()).run(requests("plain"))
    settings = Settings(drafter="mtp", num_drafts=count)
    driver = ModelDriver(t_markov(), settings)
    drafted = driver.run(requests("plain"))
    assert_same(drafted, plain)
    stats = driver.scheduler.stats().drafts
    assert stats is not None and stats.num_drafts > 0
    # Only what lies behind a request's last token was drafted in vain.
    surplus = stats.num_draft_tokens - stats.num_accepted_tokens
    assert surplus <= count * len(LENGTHS)
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)


def test_spec_09_near_tied_logits_with_any_drafts():
    """Logprobs are equal too, to the last bit, so that no tie can fall another way."""
    submits = requests("logprobs")
    plain = ModelDriver(t_tied(), Settings()).run(submits)
    for miss in (False, True):
        drafted = replaying(t_tied(), Settings(), plain, miss).run(submits)
        assert_same(drafted, plain, exact=True)
    mtp = ModelDriver(t_tied(), Settings(drafter="mtp", num_drafts=3)).run(submits)
    assert_same(mtp, plain, exact=True)


@pytest.mark.parametrize("miss", [False, True])
def test_a_thinking_budget_ends_thoughts_at_its_place_inside_a_window(miss):
    submits = requests("thinking_budget")
    plain = ModelDriver(t_cpu(), Settings()).run(submits)
    drafted = replaying(t_cpu(), Settings(), plain, miss).run(submits)
    assert drafted.num_accepted > 0
    for submit_ in submits:
        ids = drafted.ids[submit_.request_id]
        assert 70 in ids[:5] or len(ids) < 5


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.deep)])
def test_spec_12_acceptance_does_not_decay(count):
    """The same question, one request after the other in one engine, then many at once."""
    driver = ModelDriver(t_markov(), Settings(drafter="mtp", num_drafts=3))

    def acceptance(name: str, count: int) -> float:
        found = driver.run([submit(f"{name}{i}", [90, 91, 92], 13) for i in range(count)])
        return found.num_accepted / found.num_drafted

    shares = [acceptance(f"alone{i}-", 1) for i in range(count)]
    shares += [acceptance(f"many{i}-", 8) for i in range(count // 8)]
    assert min(shares) == max(shares) > 0.9


def first_drafts(submits: list[Submit], monkeypatch) -> tuple[list[list[int]], dict]:
    """What the MTP layer proposes behind the prompts, and the answers."""
    driver = ModelDriver(t_cpu(), Settings(drafter="mtp", num_drafts=2))
    assert driver.runner.drafter is not None
    propose, seen = driver.runner.drafter.propose, []

    def watch(hidden_TD, plan, sequences, outputs):
        propose(hidden_TD, plan, sequences, outputs)
        seen.append([list(output.draft_ids) for output in outputs])

    monkeypatch.setattr(driver.runner.drafter, "propose", watch)
    ids = driver.run(submits).ids
    return seen[0], ids


def test_spec_02_the_layer_selects_with_an_indexer_of_its_own(monkeypatch):
    """Beyond index_topk its guesses change when its indexer does, the answers do not."""
    submits = [c for c in requests("plain") if len(c.prompt_ids) > 16]
    mtp = model_of(t_cpu(), with_mtp=True).mtp
    assert mtp is not None and mtp.layer.attention.indexer is not None
    weight_D = mtp.layer.attention.indexer.key_norm.weight_D
    before = first_drafts(submits, monkeypatch)
    weight_D.neg_()
    try:
        after = first_drafts(submits, monkeypatch)
    finally:
        weight_D.neg_()
    assert before[0] != after[0]
    assert before[1] == after[1]
