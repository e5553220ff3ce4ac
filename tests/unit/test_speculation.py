"""Drafts in the scheduler: whatever is proposed, tokens and ends are those without drafts."""

import random

import pytest

from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.block_table import BlockTable
from minidsa.scheduler.batch import Step, Work
from minidsa.scheduler.draft_length import MEASUREMENTS, DraftLength
from minidsa.scheduler.drafters import NgramDrafter
from minidsa.scheduler.messages import Submit
from minidsa.scheduler.request import Rank, Request
from minidsa.scheduler.speculative import MOST_DRAFTS, Speculation, new_speculation
from scheduler_fakes import VOCAB, Driver, Plan, expected, submit


class Oracle:
    """Knows every answer; `wrong` makes it miss always, or at every third draft."""

    def __init__(self, wrong: str = "never") -> None:
        self.wrong = wrong

    def propose(self, request: Request, most: int) -> list[int]:
        tokens = [*request.prompt_ids, *request.output_ids]
        right = expected(tokens, most)
        if self.wrong == "always":
            return [(token + 1) % VOCAB for token in right]
        if self.wrong == "sometimes":
            return [t if (t + i) % 3 else (t + 1) % VOCAB for i, t in enumerate(right)]
        return right


def speculation(name: str, most: int = 3) -> Speculation:
    if name in ("mtp", "ngram"):
        return new_speculation(name, most, adaptive=False)
    return Speculation(Oracle(name), most, from_model=False, adaptive=False)


DRAFTERS = ("mtp", "ngram", "never", "sometimes", "always")


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pages": 12, "page_size": 4},
        {"pages": 40, "page_size": 1, "seats": 3},
        {"budget": 9, "seats": 4},
        {"preempt_every": 3},
        {"max_model_len": 24},
    ],
)
def test_spec_03_ids_are_those_without_drafts(name, most, settings):
    driver = Driver(**settings, speculation=speculation(name, most))
    rng = random.Random(most)
    prompts = {f"r{i}": [rng.randrange(VOCAB)] * rng.choice([1, 3, 8, 16]) for i in range(8)}
    for i, (request_id, prompt) in enumerate(prompts.items()):
        driver.add(submit(request_id, prompt, 4 + 3 * i))
    driver.run()
    longest = settings.get("max_model_len", 512)
    for i, (request_id, prompt) in enumerate(prompts.items()):
        count = min(
            4 + 3 * i, longest - len(prompt), driver.scheduler.limits.max_tokens - len(prompt)
        )
        assert driver.ids[request_id] == expected(prompt, count)
        assert driver.ends[request_id].finish_reason == "length"


def test_spec_04_a_shrinking_batch_gives_each_its_length():
    driver = Driver(speculation=speculation("mtp"))
    driver.add(*(submit(f"r{n}", [n], n) for n in range(1, 9)))
    driver.run()
    assert [driver.ids[f"r{n}"] for n in range(1, 9)] == [expected([n], n) for n in range(1, 9)]


@pytest.mark.parametrize(("name", "steps"), [("never", 1 + 16 // 4), ("always", 16)])
def test_spec_13_the_two_ends_of_acceptance(name, steps):
    driver = Driver(speculation=speculation(name))
    driver.add(submit("r", [5], 17))
    assert driver.run() == (steps if name == "never" else 17)
    stats = driver.scheduler.stats().drafts
    assert stats is not None
    if name == "never":
        assert stats.accepted_at == [4, 4, 4] and stats.num_draft_tokens == 12
    else:
        assert stats.num_accepted_tokens == 0 and stats.num_drafts == 16
    assert sum(output.num_accepted for output in driver.outputs) == stats.num_accepted_tokens
    assert sum(output.num_drafted for output in driver.outputs) == stats.num_draft_tokens


def test_a_stop_id_inside_an_accepted_run_cuts_ids_and_scores():
    tokens = expected([9], 12)
    driver = Driver(speculation=speculation("never", 7))
    driver.add(submit("r", [9], 12, stop_token_ids=[tokens[4]], logprobs=1))
    driver.run()
    end = driver.ends["r"]
    assert driver.ids["r"] == tokens[: tokens.index(tokens[4]) + 1]
    assert end.finish_reason == "stop"
    assert sum(len(output.logprobs or ()) for output in driver.outputs) == len(driver.ids["r"])


def test_a_stop_id_counts_only_after_min_tokens():
    tokens = expected([9], 12)
    driver = Driver(speculation=speculation("never", 7))
    driver.add(submit("r", [9], 12, stop_token_ids=tokens[2:6], min_tokens=6))
    driver.run()
    assert driver.ids["r"][:6] == tokens[:6]


def test_num_07_a_row_that_is_not_finite_ends_its_request_behind_the_good_tokens():
    tokens = expected([3], 10)
    driver = Driver(speculation=speculation("never", 7), plan=Plan(poison_token=tokens[4]))
    driver.add(submit("r", [3], 10), submit("other", [4], 10))
    driver.run()
    assert driver.ids["r"] == tokens[:5] and driver.ends["r"].finish_reason == "error"
    assert driver.ids["other"] == expected([4], 10)


def test_drafts_do_not_take_the_last_pages_of_others():
    """Two requests that fill the pool exactly run to their end without a preemption."""
    driver = Driver(pages=8, page_size=4, speculation=speculation("never", 7))
    driver.add(submit("a", [1], 15), submit("b", [2], 15))
    driver.run()
    assert driver.scheduler.counters.num_preemptions == 0
    assert driver.ids["a"] == expected([1], 15)


def test_verifying_leaves_room_for_prompts():
    driver = Driver(budget=16, seats=4, speculation=speculation("never", 7))
    driver.add(*(submit(f"r{i}", [i], 30) for i in range(3)))
    driver.step()
    driver.add(submit("late", [9] * 40, 1))
    step = driver.step()
    assert [work.num_tokens for work in step.work[:1]] == [16 - 3 * 2]


def test_a_prompt_asks_for_the_drafts_that_pay_for_what_it_becomes():
    """Guesses that its first decode would not verify are not made."""
    speculation = new_speculation("mtp", 3)
    request = Request(submit("r", [1], 9), Rank(0, 0, 0), BlockTable(4))
    for num_drafts in range(4):
        for _ in range(MEASUREMENTS):
            decode = Work(request, 0, 1 + num_drafts, True, [1] * num_drafts, num_drafts)
            speculation.observe(Step([decode], 0), 1.0 + num_drafts)
            speculation.count(num_drafts, 0)
    speculation.propose([], 64)
    assert speculation.num_ahead == 0


@pytest.mark.parametrize("most", [MOST_DRAFTS + 1, -1])
def test_impossible_numbers_of_drafts_are_refused(most):
    with pytest.raises(ValueError, match=f"num_tokens is {most}"):
        speculation("mtp", most)


def test_prompt_lookup_finds_the_latest_place_of_the_longest_suffix():
    params = SamplingParams(max_tokens=9, seed=0)
    drafter = NgramDrafter()
    command = Submit("r", [1, 2, 3, 4, 5, 9, 3, 4, 6, 7, 2, 3, 4], params)
    request = Request(command, Rank(0, 0, 0), BlockTable(4))
    assert list(drafter.propose(request, 2)) == [5, 9]
    request.take(5, 1000)
    assert list(drafter.propose(request, 4)) == [9, 3, 4, 6]
    request.take(8, 1000)
    assert list(drafter.propose(request, 4)) == []
    for token in (3, 4):
        request.take(token, 1000)
    assert list(drafter.propose(request, 9)) == [5, 8, 3, 4]


def filled(most: int, seconds) -> DraftLength:
    lengths = DraftLength(most, adaptive=True)
    for k in range(most + 1):
        for _ in range(MEASUREMENTS):
            lengths.observe_time(4, k, seconds(k))
    return lengths


def climbed(lengths: DraftLength, num_requests: int, seconds, steps: int) -> list[int]:
    tried = []
    for _ in range(steps):
        tried.append(lengths.choose(num_requests))
        lengths.observe_time(num_requests, tried[-1], seconds(tried[-1]))
    return tried


def test_the_search_starts_low_and_climbs_while_drafts_are_free():
    tried = climbed(DraftLength(3, adaptive=True), 1, lambda k: 1.0, 4 * MEASUREMENTS)
    assert tried == [k for k in (2, 1, 3, 3) for _ in range(MEASUREMENTS)]
    tried = climbed(DraftLength(3, adaptive=True), 32, lambda k: 1.0, 5 * MEASUREMENTS)
    assert tried == [k for k in (0, 1, 2, 3, 3) for _ in range(MEASUREMENTS)]


def test_a_large_batch_for_which_drafts_never_pay_tries_one_length_only():
    tried = climbed(DraftLength(7, adaptive=True), 32, lambda k: 1.0 + 1.5 * k, 63)
    assert max(tried) == 1 and tried.count(1) == MEASUREMENTS


@pytest.mark.parametrize("num_requests", [1, 3, 32])
def test_lengths_that_lose_are_left_whatever_disturbs_a_few_steps(num_requests):
    """Every ninth step takes thrice its time; the first draft is right in 6 of 10 cases."""
    lengths, rng, tried = DraftLength(3, adaptive=True), random.Random(0), []
    for step in range(400):
        tried.append(lengths.choose(num_requests))
        seconds = (1.0 + 0.9 * tried[-1]) * rng.uniform(0.9, 1.1) * (3 if step % 9 == 0 else 1)
        lengths.observe_time(num_requests, tried[-1], seconds)
        if tried[-1]:
            lengths.observe_acceptance(tried[-1], int(rng.random() < 0.6))
    assert tried.count(0) > 360 and set(tried[40:]) <= {0, 1}


def test_a_longer_draft_is_not_tried_where_the_last_one_says_that_it_cannot_pay():
    lengths = filled(2, lambda k: (1.0, 1.1, 1.2)[k])
    for _ in range(200):
        lengths.observe_acceptance(2, 1)
    wide = DraftLength(7, adaptive=True)
    tried = climbed(wide, 4, lambda k: 1.0 + 0.75 * k, 63)
    assert lengths.choose(4) == 1 and max(tried) == 1


def test_the_length_falls_with_acceptance_and_with_cost():
    cheap, dear = filled(3, lambda k: 1 + 0.2 * k), filled(3, lambda k: 1.0 + 1.5 * k)
    assert cheap.choose(4) == 3 and dear.choose(4) == 0
    for _ in range(200):
        cheap.observe_acceptance(3, 1)
    assert cheap.choose(4) == 1
    for _ in range(200):
        cheap.observe_acceptance(1, 0)
    assert cheap.choose(4) == 0


def test_a_neighbour_is_tried_now_and_then():
    lengths = filled(3, lambda k: 1.0 + 0.7 * abs(k - 2))
    assert {lengths.choose(4) for _ in range(400)} == {1, 2, 3}


def test_a_length_that_was_measured_at_a_bad_moment_is_measured_anew():
    """Steps without drafts took ten times as long when they were measured first."""
    lengths = DraftLength(1, adaptive=True)
    for k, seconds in ((0, 10.0), (1, 1.9)):
        for _ in range(MEASUREMENTS):
            lengths.observe_time(4, k, seconds)
    lengths.observe_acceptance(1, 0)
    tried = climbed(lengths, 4, lambda k: (1.0, 1.9)[k], 200)
    assert 0 not in tried[:50] and tried[100:].count(0) >= 90


def test_a_fixed_length_stays():
    lengths = DraftLength(5, adaptive=False)
    assert {lengths.choose(n) for n in range(40)} == {5}


def test_a_shorter_draft_that_took_twice_as_long_says_nothing_of_a_longer_one():
    """As after a step without drafts that was disturbed: no time is 0 or less."""
    lengths = DraftLength(3, adaptive=True)
    for k, seconds in ((0, 4.0), (1, 2.0)):
        for _ in range(MEASUREMENTS):
            lengths.observe_time(1, k, seconds)
    assert lengths.choose(1) == 2
