"""Who goes next: turns, priorities, prompts that share a step, and deadlines."""

import random

import pytest

from minidsa.scheduler.messages import Handling
from minidsa.scheduler.policy import TURNS_A_LEVEL, Ranking
from scheduler_fakes import Driver, expected, submit


def prompt(length, start=1):
    return [(start * 37 + i * 11) % 500 for i in range(length)]


def started(driver):
    """Names of the requests in the order in which they first ran, until all is done."""
    order = []
    while driver.scheduler.has_work:
        for work in driver.step().work:
            if work.request.request_id not in order:
                order.append(work.request.request_id)
    return order


def test_one_tenant_is_served_first_come_first_served():
    ranking = Ranking()
    ranks = [ranking.assign(Handling()) for _ in range(5)]
    ranking.serve(ranks[3])
    ranks += [ranking.assign(Handling()) for _ in range(5)]
    assert sorted(ranks) == ranks and len(set(ranks)) == 10


def test_a_tenant_that_sends_a_hundred_at_once_takes_turns_with_others():
    driver = Driver(seats=1, queue=200)
    many = [submit(f"many{i}", prompt(3, i), 1, Handling(tenant="many")) for i in range(100)]
    driver.add(*many)
    for _ in range(10):
        driver.step()
    driver.add(*(submit(f"few{i}", prompt(3, i), 1, Handling(tenant="few")) for i in range(3)))
    order = started(driver)
    assert [order.index(f"few{i}") for i in range(3)] == [1, 3, 5]


def test_a_tenant_that_was_away_has_saved_nothing_up():
    driver = Driver(seats=1)
    driver.add(*(submit(f"a{i}", prompt(3, i), 1, Handling(tenant="a")) for i in range(30)))
    started(driver)
    for i in range(4):
        driver.add(submit(f"a{30 + i}", prompt(3, i), 1, Handling(tenant="a")))
        driver.add(submit(f"b{i}", prompt(3, i), 1, Handling(tenant="b")))
    assert started(driver) == [f"{name}{i + 30 * (name == 'a')}" for i in range(4) for name in "ab"]


def test_the_smallest_priority_goes_first_and_equals_in_order():
    driver = Driver(seats=1)
    driver.add(submit("running", prompt(3), 3))
    driver.step()
    for i, priority in enumerate((0, 5, -1, 5, -1, 0)):
        driver.add(submit(f"r{i}", prompt(3, i), 1, Handling(priority=priority)))
    assert started(driver) == ["running", "r2", "r4", "r0", "r5", "r1", "r3"]


def test_nothing_starves_however_important_the_others_are():
    driver = Driver(seats=1, queue=8)
    driver.add(submit("patient", prompt(3), 1))
    urgent = 0
    while "patient" not in driver.ends:
        while len(driver.scheduler.queue) < 4:
            driver.add(submit(f"u{urgent}", prompt(3, urgent), 1, Handling(priority=-2)))
            urgent += 1
        driver.step()
    assert 2 * TURNS_A_LEVEL < urgent < 2 * TURNS_A_LEVEL + 8


def test_a_more_important_newcomer_is_not_the_one_to_give_way():
    driver = Driver(pages=9, seats=3)
    driver.add(submit("old", prompt(8), 20), submit("plain", prompt(8, 2), 20))
    driver.step()
    driver.add(submit("urgent", prompt(4, 3), 12, Handling(priority=-1)))
    driver.step()
    assert [r.request_id for r in driver.scheduler.running] == ["urgent", "old", "plain"]
    while not driver.scheduler.counters.num_preemptions:
        driver.step()
    assert [r.request_id for r in driver.scheduler.running] == ["urgent", "old"]
    driver.run()
    for name, start, length, count in (
        ("old", 1, 8, 20),
        ("plain", 2, 8, 20),
        ("urgent", 3, 4, 12),
    ):
        assert driver.ids[name] == expected(prompt(length, start), count)


def test_the_prompt_with_the_least_work_left_is_computed_first():
    driver = Driver(budget=16, pages=100, max_prefill_tokens=16)
    driver.add(submit("long", prompt(160), 1))
    driver.step()
    driver.add(submit("short", prompt(9, 2), 1))
    assert [w.request.request_id for w in driver.step().work] == ["short", "long"]
    assert driver.ids["short"] == expected(prompt(9, 2), 1)
    driver.run()


def test_the_oldest_prompt_goes_first_where_that_is_wanted():
    driver = Driver(budget=16, pages=100, prefill_order="oldest")
    driver.add(submit("long", prompt(160), 1))
    driver.step()
    driver.add(submit("short", prompt(9, 2), 1))
    for _ in range(8):
        assert [w.request.request_id for w in driver.step().work] == ["long"]
    driver.run()
    assert driver.ids["short"] == expected(prompt(9, 2), 1)


def test_a_long_prompt_does_not_starve_behind_short_ones():
    driver = Driver(budget=16, seats=4, pages=200, max_prefill_tokens=16)
    driver.add(submit("long", prompt(320), 1))
    steps = 0
    while "long" not in driver.ends:
        while len(driver.scheduler.queue) < 3:
            driver.add(submit(f"s{len(driver.ids)}", prompt(15, len(driver.ids)), 1))
        driver.step()
        steps += 1
    # Twenty chunks of its own; of those that came in the first twenty steps some went before it.
    assert steps < 80


def test_a_decode_never_waits_for_more_than_one_chunk():
    driver = Driver(budget=64, pages=200, max_prefill_tokens=8)
    driver.add(submit("a", prompt(40), 30))
    assert driver.step().num_tokens == 40  # nobody decodes yet
    driver.add(*(submit(f"long{i}", prompt(50, 2 + i), 1) for i in range(3)))
    while "a" not in driver.ends:
        step = driver.step()
        decodes = step.work[step.num_extends :]
        assert "a" in [w.request.request_id for w in decodes]
        assert step.num_tokens - len(decodes) <= 8
    driver.run()


def test_all_that_are_longer_than_the_pool_are_refused_and_the_rest_never_locks():
    rng = random.Random(1)
    driver = Driver(pages=6, seats=5, budget=9, queue=40)
    for i in range(40):
        ids = prompt(rng.randrange(1, 23), i)
        driver.add(submit(f"r{i}", ids, 2, Handling(priority=rng.randrange(-3, 4))))
    driver.run()
    assert {end.finish_reason for end in driver.ends.values()} == {"length"}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_sch_25_what_waits_too_long_is_refused_without_a_page_touched():
    clock = Clock()
    driver = Driver(seats=1, clock=clock, queue_timeout=0.25)
    driver.add(submit("running", prompt(9), 20), submit("waiting", prompt(9, 2), 20))
    driver.step()
    clock.now += 0.125
    assert driver.scheduler.expire() == []
    driver.step()
    clock.now += 0.125
    (output,) = driver.scheduler.expire()
    assert (output.request_id, output.finish_reason) == ("waiting", "error")
    assert output.error_kind == "timeout" and "waited too long" in (output.error or "")
    assert driver.scheduler.expire() == []
    driver.scheduler.check()
    driver.run()
    assert driver.ids["running"] == expected(prompt(9), 20)
    assert sum(map(sum, driver.runner.batches)) == 9 + 19


def test_a_preempted_request_is_not_one_that_waited_to_start():
    clock = Clock()
    driver = Driver(clock=clock, queue_timeout=0.2)
    driver.add(submit("a", prompt(9), 5))
    driver.step()
    driver.scheduler.preempt_last()
    clock.now += 1
    assert driver.scheduler.expire() == []
    driver.run()
    assert driver.ids["a"] == expected(prompt(9), 5)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_deadline_ends_a_request_wherever_it_stands(steps):
    clock = Clock()
    driver = Driver(clock=clock, budget=8)
    driver.add(submit("a", prompt(12), 50, Handling(deadline_seconds=5.0)), submit("b", prompt(5)))
    for _ in range(steps):
        driver.step()
    clock.now += 5.0
    driver.take(driver.scheduler.expire())
    assert driver.ends["a"].finish_reason == ("abort" if steps else "error")
    driver.scheduler.check()
    driver.run()
    assert driver.ids["b"] == expected(prompt(5), 8)


def test_an_alarm_of_a_finished_request_is_silent():
    clock = Clock()
    driver = Driver(clock=clock)
    driver.add(submit("a", prompt(3), 2, Handling(deadline_seconds=1.0)))
    driver.run()
    clock.now += 9.0
    assert driver.scheduler.expire() == []


@pytest.mark.parametrize("seats", [1, 2, 5])
def test_tenants_get_equal_shares_of_a_loaded_server_however_much_they_send(seats):
    """Three that always have more to ask, one of them ten times as much: each gets a third."""
    driver = Driver(seats=seats, queue=200, pages=400)
    waiting = {"flood": 60, "some": 6, "few": 6}
    sent, finished = dict.fromkeys(waiting, 0), dict.fromkeys(waiting, 0)
    rng = random.Random(seats)
    while len(driver.ends) < 300:
        for tenant, most in waiting.items():
            while sent[tenant] - finished[tenant] < most:
                ids = prompt(rng.randrange(2, 9), sent[tenant])
                name = f"{tenant}{sent[tenant]}"
                driver.add(submit(name, ids, rng.randrange(1, 4), Handling(tenant=tenant)))
                sent[tenant] += 1
        driver.step()
        for tenant in waiting:
            finished[tenant] = sum(name.startswith(tenant) for name in driver.ends)
    assert max(finished.values()) - min(finished.values()) <= 2 * seats, finished
    for tenant in waiting:
        for i in range(sent[tenant]):
            driver.abort(f"{tenant}{i}")


def test_who_asks_now_and_then_is_not_made_to_wait_by_who_floods():
    driver = Driver(seats=2, queue=200, pages=400)
    floods = 0
    for patient in range(20):
        while len(driver.scheduler.queue) < 50:
            driver.add(submit(f"f{floods}", prompt(5, floods), 3, Handling(tenant="flood")))
            floods += 1
        driver.step()
        name = f"p{patient}"
        driver.add(submit(name, prompt(5, patient), 3, Handling(tenant="patient")))
        before, steps = len(driver.ends), 0
        while name not in driver.ends:
            driver.step()
            steps += 1
        # Its own steps behind those of who runs already, and of one who was next.
        assert steps <= 3 + 2 * 3 and len(driver.ends) - before <= 5
