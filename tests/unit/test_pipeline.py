"""Steps that are started before the tokens in front of them are known: every request says the same.

`Leading` stands for the device. That nothing else changes under any order of events is what
`test_scheduler_machine.py` and `test_equality.py` show, which run ahead in half of their histories.
"""

import random

import pytest

from late_device import LateDevice, PlainRunner
from minidsa.model.sequence import NON_FINITE
from minidsa.scheduler.engine import Engine
from minidsa.scheduler.messages import Abort
from minidsa.scheduler.pipeline import Pipeline
from minidsa.scheduler.speculative import new_speculation
from scheduler_fakes import Driver, Plan, expected, submit
from scripted_link import CountingWatchdog, ScriptedLink


def serve(turns, plan=None, **settings):
    """An engine that ran to its end, its link and its driver."""
    driver = Driver(plan=plan, leads=True, **settings)
    link = ScriptedLink(turns)
    Engine(driver.leading, driver.scheduler, link, CountingWatchdog()).run()
    driver.scheduler.check_idle()
    return link, driver


def test_decodes_are_started_ahead_and_say_the_same():
    driver = Driver(leads=True)
    driver.add(*(submit(f"r{i}", [i, 7, i], 10 + i) for i in range(4)))
    driver.run()
    for i in range(4):
        assert driver.ids[f"r{i}"] == expected([i, 7, i], 10 + i)
        assert driver.ends[f"r{i}"].finish_reason == "length"
    # A prompt's token is waited for, and so is the first decode; every other step is ahead.
    assert driver.leading.num_ahead == driver.runner.num_steps - 2
    # Known lengths cost no step too many.
    assert driver.runner.num_steps == 13


def test_what_is_computed_behind_a_stop_is_dropped():
    prompt = [3, 1, 4]
    ids = expected(prompt, 12)
    driver = Driver(leads=True)
    driver.add(submit("stops", prompt, 40, stop_token_ids=[ids[5]]), submit("mate", [9], 12))
    driver.run()
    assert driver.ids["stops"] == ids[: ids.index(ids[5]) + 1]
    assert driver.ends["stops"].finish_reason == "stop"
    assert driver.ids["mate"] == expected([9], 12)


def test_who_waits_enters_as_soon_as_a_seat_is_free():
    driver = Driver(leads=True, seats=1)
    driver.add(submit("a", [1], 5), submit("b", [2], 5))
    assert driver.run() == 10
    assert driver.ids["b"] == expected([2], 5)


def test_who_waits_for_pages_holds_up_nobody():
    """b has a seat, but its pages are there only when a is done."""
    driver = Driver(leads=True, pages=8, page_size=4)
    driver.add(submit("a", [1] * 4, 16), submit("b", [2] * 28, 3))
    assert driver.run() == 19
    assert driver.ids["a"] == expected([1] * 4, 16)
    assert driver.ids["b"] == expected([2] * 28, 3)
    # Every step but a prompt, its first decode and the last of a, whose end is known.
    assert driver.leading.num_ahead > 10


def test_a_newcomer_is_not_held_up():
    """One step is under way when it comes; the next brings its prompt."""
    link, driver = serve([[submit("a", [1, 2], 30)], [], [], [submit("b", [3] * 9, 4)]])
    assert link.ids("a") == expected([1, 2], 30)
    assert link.ids("b") == expected([3] * 9, 4)
    prompts = [i for i, lengths in enumerate(driver.runner.batches) if 9 in lengths]
    assert prompts == [4]


def test_pages_are_free_within_two_steps_of_an_abort():
    link, driver = serve([[submit("a", [1, 2], 90)], [], [], [Abort("a")]])
    assert link.ends()["a"].finish_reason == "abort"
    assert driver.runner.num_steps <= 5
    stats = link.events[-1].stats
    assert stats.num_free_pages == stats.num_pages


@pytest.mark.parametrize("step", range(1, 12))
def test_a_step_that_fails_takes_the_one_behind_it_along(step, caplog):
    first = [submit(f"r{i}", [i, i + 1, i + 2], 20) for i in range(3)]
    link, driver = serve([first], Plan(fail_steps=frozenset({step})))
    for command in first:
        assert link.ids(command.request_id) == expected(command.prompt_ids, 20)
    assert f"planned failure of step {step}" in caplog.text
    assert driver.leading.num_ahead > 10


def test_the_row_behind_no_number_is_never_taken():
    prompt = [5, 6]
    poison = expected(prompt, 4)[3]
    driver = Driver(leads=True, plan=Plan(poison_token=poison))
    driver.add(submit("bad", prompt, 30), submit("good", [1], 12))
    driver.run()
    assert driver.ends["bad"].error == NON_FINITE
    assert driver.ids["good"] == expected([1], 12)


def test_drafts_are_not_ahead():
    driver = Driver(leads=True, speculation=new_speculation("ngram", 2))
    driver.add(submit("a", [1, 2, 1, 2, 1], 12))
    driver.run()
    assert driver.ids["a"] == expected([1, 2, 1, 2, 1], 12)
    assert driver.leading.num_ahead == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_short_pages_preempt_as_before(page_size):
    driver = Driver(leads=True, pages=40 // page_size, page_size=page_size)
    driver.add(*(submit(f"r{i}", [i] * 8, 20) for i in range(3)))
    driver.run()
    for i in range(3):
        assert driver.ids[f"r{i}"] == expected([i] * 8, 20)
    assert driver.scheduler.stats().num_preemptions > 0
    assert driver.leading.num_ahead > 0


@pytest.mark.parametrize("seed", range(60))
def test_rows_behind_an_end_harm_nobody_however_late_they_are_written(seed):
    """Stops, aborts, short pages and shared prefixes, in random order."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    # The longest request fits, and not all of them do.
    pages = rng.randint(56 // page_size + 1, 120 // page_size)
    driver = Driver(
        runner=PlainRunner(pages, page_size),
        seats=rng.randint(1, 6),
        budget=rng.randint(6, 40),
        preempt_every=rng.choice([0, 0, 5]),
    )
    device = LateDevice(driver.runner)
    driver.pipeline = Pipeline(device, driver.scheduler)
    shared, sent = [rng.randrange(9) for _ in range(30)], {}
    for turn in range(120):
        if rng.random() < 0.2:
            own = [rng.randrange(500) for _ in range(rng.randint(1, 9))]
            prompt, count = shared[: rng.randint(0, 16)] + own, rng.randint(1, 30)
            whole = expected(prompt, count)
            stop = rng.choice(whole) if rng.random() < 0.5 else None
            sent[f"r{turn}"] = whole if stop is None else whole[: whole.index(stop) + 1]
            ends = [] if stop is None else [stop]
            driver.add(submit(f"r{turn}", prompt, count, stop_token_ids=ends))
        alive = sorted(set(sent) - set(driver.ends))
        if alive and rng.random() < 0.1:
            driver.abort(rng.choice(alive))
        driver.step()
    driver.run()
    assert device.num_ahead > 0
    for name, whole in sent.items():
        is_whole = driver.ends[name].finish_reason != "abort"
        assert driver.ids[name] == (whole if is_whole else whole[: len(driver.ids[name])])
