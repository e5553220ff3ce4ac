"""Cached prefixes: what is found, for whom, and that nobody's tokens change because of it."""

import random

import pytest

from canary_runner import CanaryDriver
from minidsa.kv_cache.prefix_cache import KeyChain, PrefixCache, root_key
from minidsa.model.sequence import SequenceOutput
from minidsa.scheduler.messages import Handling
from scheduler_fakes import Driver, Plan, expected, submit


def prompt(length, start=1):
    return [(start * 37 + i * 11) % 500 for i in range(length)]


def run(driver, name, ids, max_tokens=4, handling=None, **settings):
    """Serve one request to its end; returns its cached tokens and the tokens computed for it."""
    before = sum(map(sum, driver.runner.batches))
    driver.add(submit(name, ids, max_tokens, handling, **settings))
    driver.run()
    assert driver.ids[name] == expected(ids, max_tokens)
    return driver.ends[name].cached_tokens, sum(map(sum, driver.runner.batches)) - before


def chain_of(ids, page_size=4):
    chain = KeyChain(root_key(), page_size)
    chain.extend(ids)
    return chain.keys


def test_a_key_stands_for_all_tokens_before_its_end():
    keys = chain_of(range(12))
    assert len(set(keys)) == 3
    assert chain_of([*range(8), 8, 9, 10, 12])[:2] == keys[:2]
    for i in range(12):
        other = list(range(12))
        other[i] += 1
        agree = [a == b for a, b in zip(keys, chain_of(other), strict=True)]
        assert agree == [page < i // 4 for page in range(3)]


def test_keys_do_not_depend_on_how_they_were_added():
    chain = KeyChain(root_key(), 4)
    for start in range(0, 24, 8):
        chain.extend(range(start, start + 8))
    assert chain.keys == chain_of(range(24)) and chain.num_tokens == 24


def test_framing_tells_apart_what_spells_the_same_bytes():
    roots = {root_key(*salts) for salts in ((), ("",), ("", ""), ("ab",), ("a", "b"), ("", "ab"))}
    assert len(roots) == 6
    assert chain_of([1, 2, 3, 4], 4)[0] not in chain_of([1, 2, 3, 4], 2)


def test_the_first_page_of_a_key_stays_and_an_idle_page_is_given_up_in_turn():
    cache = PrefixCache()
    cache.publish(7, b"a")
    cache.publish(8, b"a")
    cache.publish(9, b"b")
    assert cache.find([b"a", b"b", b"c"]) == [7, 9] and 8 not in cache
    assert cache.find([b"b"]) == [9] and cache.find([b"c", b"a"]) == []
    cache.rest([9, 7])
    cache.wake([9])
    cache.check()
    assert cache.give_up() == (7, b"a")
    assert cache.find([b"a", b"b"]) == []
    with pytest.raises(KeyError):
        cache.give_up()
    cache.rest([9])
    assert cache.clear() == [9] and len(cache) == 0


@pytest.mark.parametrize(
    ("length", "cached"), [(16, 12), (15, 12), (17, 16), (4, 0), (5, 4), (1, 0), (3, 0)]
)
def test_sch_01_the_last_prompt_token_is_always_computed(length, cached):
    driver = Driver()
    assert run(driver, "cold", prompt(length))[0] == 0
    assert run(driver, "warm", prompt(length)) == (cached, length - cached + 3)
    stats = driver.scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (2 * length, cached)
    assert stats.num_prompt_tokens == 2 * length


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("budget", [8, 200])
def test_sch_03_equal_prompts_in_one_tick(others, budget):
    driver = Driver(budget=budget)
    same = [submit(f"same{i}", prompt(32), 6) for i in range(1 + others)]
    first_page = submit("part", [*prompt(4), *prompt(28, 3)], 6)
    driver.add(*same, first_page)
    driver.run()
    for command in (*same, first_page):
        assert driver.ids[command.request_id] == expected(command.prompt_ids, 6)
    assert run(driver, "later", prompt(32))[0] == 28


def test_generated_tokens_are_cached_too():
    driver = Driver()
    run(driver, "turn1", prompt(10), 11)
    history = [*prompt(10), *expected(prompt(10), 11)]
    # Rows of the last token were never computed: 20 of 21 tokens fill five pages.
    assert run(driver, "turn2", [*history, 5, 6, 7])[0] == 20


def test_sch_10_a_third_turn_whose_rest_fits_one_chunk():
    driver = Driver(budget=16, seats=4)
    history = prompt(20)
    for turn in range(3):
        cached, _ = run(driver, f"turn{turn}", history, 8)
        assert cached == (0, 24, 36)[turn]
        history = [*history, *expected(history, 8), *prompt(4, turn + 5)]


def test_sch_11_a_prompt_between_two_equal_ones():
    driver = Driver(pages=40, page_size=16)
    a, b = prompt(400), prompt(300, 2)
    for name, ids in (("a1", a), ("b", b), ("a2", a)):
        run(driver, name, ids, 20)
    assert driver.ids["a1"] == driver.ids["a2"]
    assert 0 < driver.ends["a2"].cached_tokens < 400  # the end of it had to give way
    assert driver.scheduler.stats().num_evictions > 0


def test_sch_21_tenants_and_salts_do_not_meet():
    driver = Driver(pages=200)
    handlings = [
        Handling(tenant=t, cache_salt=s) for t in ("", "x", "y") for s in ("", "x", "secret")
    ]
    for turn in range(2):
        for i, handling in enumerate(handlings):
            cached, _ = run(driver, f"r{turn}.{i}", prompt(64), handling=handling)
            assert cached == (60 if turn else 0)


def test_sch_09_a_request_without_the_cache_finishes_in_its_chunks_and_leaves_nothing():
    driver = Driver(budget=8)
    off = Handling(uses_cache=False)
    driver.add(submit("a", prompt(40), 2, off))
    assert driver.run() == 5 + 1
    assert driver.ids["a"] == expected(prompt(40), 2)
    assert driver.scheduler.stats().num_cached_pages == 0
    run(driver, "b", prompt(40))
    assert run(driver, "c", prompt(40), handling=off)[0] == 0
    assert run(driver, "d", prompt(40))[0] == 36
    assert driver.scheduler.stats().num_prefix_queries == 80


def test_with_reuse_off_nothing_is_kept():
    driver = Driver(reuse=False)
    for name in "ab":
        assert run(driver, name, prompt(40))[0] == 0
    stats = driver.scheduler.stats()
    assert (stats.num_cached_pages, stats.num_prefix_queries, stats.num_prefix_hits) == (0, 0, 0)
    assert driver.scheduler.cache.pool.num_free == 64


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("preempt_at", [None, 1, 3])
def test_prompt_scores_are_computed_in_full_although_the_prompt_is_cached(max_tokens, preempt_at):
    driver = Driver(budget=12)
    run(driver, "warm", prompt(30))
    driver.add(submit("a", prompt(30), max_tokens, prompt_logprobs=1))
    for _ in range(preempt_at or 0):
        driver.step()
    if preempt_at and driver.scheduler.running:
        driver.scheduler.preempt_last()
    driver.run()
    (scores,) = [o.prompt_logprobs for o in driver.outputs if o.prompt_logprobs is not None]
    assert [entry.rank - 1 for entry in scores] == prompt(30)[1:]
    assert driver.ids["a"] == expected(prompt(30), max_tokens)
    assert driver.ends["a"].cached_tokens == 0
    assert run(driver, "b", prompt(30))[0] == 28


def test_only_computed_rows_are_published():
    driver = Driver(budget=10, seats=2)
    driver.add(submit("a", prompt(40), 4))
    for computed in (10, 20, 30):
        driver.step()
        assert driver.scheduler.stats().num_cached_pages == computed // 4
    driver.abort("a")
    assert run(driver, "b", prompt(40))[0] == 28


def test_rows_of_a_request_that_failed_are_not_used_again():
    driver = Driver(plan=Plan(poison_token=499), budget=8)
    driver.add(submit("bad", [*prompt(20), 499, 3, 4], 4))
    driver.run()
    assert driver.ends["bad"].finish_reason == "error"
    stats = driver.scheduler.stats()
    assert stats.num_cached_pages == 0 and driver.scheduler.cache.pool.num_free == 64


def test_rows_of_a_request_that_failed_are_not_found_on_the_host_either():
    driver = CanaryDriver(pages=8, page_size=4, host_pages=20)
    for name, ids in (("a", prompt(30)), ("b", prompt(30, 2))):
        driver.add(submit(name, ids, 1))
        driver.run()
    assert driver.scheduler.stats().num_host_pages > 0
    driver.add(submit("failed", prompt(30), 1))
    step = driver.scheduler.schedule()
    assert driver.scheduler.stats().num_host_loads > 0
    driver.take(driver.scheduler.commit(step, [SequenceOutput(error="planned")]))
    driver.add(submit("c", prompt(30), 1))
    driver.run()
    assert driver.ends["c"].cached_tokens == 0


def test_a_preempted_request_finds_its_rows_again():
    driver = Driver(budget=64)
    driver.add(submit("a", prompt(30), 20))
    for _ in range(6):
        driver.step()
    driver.scheduler.preempt_last()
    driver.step()
    assert driver.runner.batches[-1] == [36 - 32]
    driver.run()
    assert driver.ids["a"] == expected(prompt(30), 20)
    assert driver.ends["a"].cached_tokens == 0  # of its own rows nothing was cached before


def test_flush_empties_an_idle_cache_and_refuses_a_busy_one():
    driver = Driver()
    run(driver, "a", prompt(40))
    scheduler = driver.scheduler
    assert scheduler.stats().num_cached_pages == 10 and scheduler.cache.pool.num_free < 64
    driver.add(submit("b", prompt(40)))
    assert not scheduler.flush_cache() and scheduler.stats().num_cached_pages == 10
    driver.step()
    assert not scheduler.flush_cache()
    driver.run()
    assert scheduler.flush_cache()
    assert scheduler.stats().num_cached_pages == 0 and scheduler.cache.pool.num_free == 64
    assert run(driver, "c", prompt(40))[0] == 0


def test_the_page_used_longest_ago_goes_first_and_a_prefix_after_its_continuations():
    driver = Driver(pages=13, seats=1, budget=64)
    run(driver, "a1", prompt(17), 1)
    run(driver, "b1", prompt(17, 2), 1)
    run(driver, "a2", prompt(17), 1)
    run(driver, "c", prompt(24, 3), 1)  # six pages, one of them b's
    assert driver.scheduler.stats().num_evictions == 1
    assert run(driver, "a3", prompt(17), 1)[0] == 16
    assert run(driver, "b2", prompt(17, 2), 1)[0] == 8  # a3 took a page for its last token


@pytest.mark.parametrize("seed", range(8))
def test_sch_29_hot_cold_and_evicted_prefixes_give_the_same_ids(seed):
    rng = random.Random(seed)
    driver = Driver(
        pages=rng.choice([14, 30, 80]),
        page_size=rng.choice([1, 3, 4]),
        budget=rng.choice([6, 9, 40]),
        seats=rng.choice([1, 3, 5]),
        preempt_every=rng.choice([0, 0, 3]),
    )
    longest = driver.scheduler.limits.max_tokens
    stems = [prompt(rng.randrange(4, 20), i) for i in range(3)]
    commands = []
    for i in range(40):
        ids = [*rng.choice(stems), *prompt(rng.randrange(1, 6), rng.randrange(4))]
        room = longest - len(ids)
        if room > 0:
            commands.append(submit(f"r{i}", ids, min(rng.randrange(1, 8), room)))
    for command in commands:
        driver.add(command)
        for _ in range(rng.randrange(3)):
            driver.step()
    driver.run()
    for command in commands:
        count = command.params.max_tokens
        assert driver.ids[command.request_id] == expected(command.prompt_ids, count)
    assert driver.scheduler.stats().num_prefix_hits > 0
