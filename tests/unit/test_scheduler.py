"""Steps, admission, preemption and abort, on a runner whose tokens depend on every page it reads.

The expected ids are those of the request alone, without a cache. Freed pages are poisoned, and the
books are checked after every step.
"""

import subprocess
import sys

import pytest

from minidsa.configs.engine import SchedulerConfig
from minidsa.kv_cache.cache import KvCache
from minidsa.model.sequence import SequenceOutput
from minidsa.scheduler.admission import DuplicateId, Overloaded, Refused
from minidsa.scheduler.launch import launch
from minidsa.scheduler.request import Phase, State
from minidsa.scheduler.scheduler import Scheduler
from minidsa.scheduler.stats import STEP_SIZES
from scheduler_fakes import Driver, FakeRunner, Plan, expected, submit


def prompt(length, start=1):
    return [(start * 37 + i * 11) % 500 for i in range(length)]


def run_all(driver, *commands):
    driver.add(*commands)
    steps = driver.run()
    for command in commands:
        assert driver.ids[command.request_id] == expected(
            command.prompt_ids, command.params.max_tokens
        ), command.request_id
        assert driver.ends[command.request_id].finish_reason == "length"
    return steps


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("budget", [8, 9, 13, 64])
@pytest.mark.parametrize("seats", [1, 3, 8])
def test_ids_do_not_depend_on_pages_chunks_or_mates(page_size, budget, seats):
    driver = Driver(pages=400 // page_size, page_size=page_size, budget=budget, seats=seats)
    lengths = (1, 2, 7, 8, 9, 16, 17, 40, 3)
    run_all(driver, *(submit(f"r{n}", prompt(n, n), 1 + n % 6) for n in lengths))


def test_a_long_prompt_shares_each_step_with_every_decode():
    driver = Driver(budget=8, pages=100)
    driver.add(submit("a", prompt(3), 40), submit("b", prompt(3, 2), 40))
    driver.step()
    driver.add(submit("long", prompt(60), 1))
    while "long" not in driver.ends:
        step = driver.step()
        assert [w.request.request_id for w in step.work[step.num_extends :]] == ["a", "b"]
        assert step.num_tokens <= 8
    assert len(driver.ids["a"]) == 1 + 10  # 60 tokens beside two decodes: ten steps
    driver.run()


@pytest.mark.parametrize("chunk", [8, 11, 20, 41])
def test_sch_08_two_chunked_prompts_coexist(chunk):
    driver = Driver(budget=chunk)
    run_all(driver, submit("a", prompt(20), 5), submit("b", prompt(21, 2), 5))


@pytest.mark.parametrize("spare", [1, 2, 3])
def test_sch_04_requests_as_large_as_the_pool_take_turns(spare):
    pages = 10 + spare
    driver = Driver(pages=pages, budget=8)
    outputs = 4 * spare
    steps = run_all(driver, submit("a", prompt(40), outputs), submit("b", prompt(40, 2), outputs))
    assert driver.scheduler.counters.num_preemptions == 0
    assert steps <= 2 * (5 + outputs)


@pytest.mark.parametrize("at", range(1, 20))
def test_sch_06_a_preemption_neither_cuts_nor_repeats_output(at):
    driver = Driver()
    driver.add(submit("a", prompt(9), 20, prompt_logprobs=1, logprobs=0))
    for _ in range(at):
        driver.step()
    driver.scheduler.preempt_last()
    driver.run()
    assert driver.ids["a"] == expected(prompt(9), 20)
    assert driver.scheduler.stats().num_generation_tokens == 20
    assert driver.scheduler.stats().num_prompt_tokens == 9
    assert driver.scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize(("pages", "preempts"), [(7, True), (12, False)])
def test_sch_07_a_small_pool_preempts_and_changes_nothing(pages, preempts):
    driver = Driver(pages=pages, page_size=16)
    run_all(driver, submit("a", prompt(34), 35), submit("b", prompt(34, 2), 35))
    assert (driver.scheduler.counters.num_preemptions > 0) is preempts


@pytest.mark.parametrize("pages", [12, 24])
@pytest.mark.parametrize("budget", [8, 64])
def test_sch_26_requests_that_outgrow_the_pool(pages, budget):
    driver = Driver(pages=pages, budget=budget)
    commands = [submit(f"r{i}", prompt(5 + i, i), 25 + i) for i in range(6)]
    run_all(driver, *commands)
    preemptions = driver.scheduler.counters.num_preemptions
    # Each one frees more than the page it was for, and resumes only after somebody finished.
    assert 0 < preemptions <= 6 * 6


@pytest.mark.parametrize("every", range(1, 8))
def test_sch_28_forced_preemption_changes_nothing(every):
    driver = Driver(preempt_every=every, budget=200)
    run_all(driver, *(submit(f"r{i}", prompt(6 + i, i), 12) for i in range(4)))
    assert driver.scheduler.counters.num_preemptions > 0


def test_the_youngest_gives_way_and_resumes_before_anything_new():
    driver = Driver(pages=8, page_size=4, seats=3)
    driver.add(submit("old", prompt(8), 20), submit("young", prompt(8, 2), 20))
    driver.step()
    driver.add(submit("new", prompt(4, 3), 2))
    while not driver.scheduler.counters.num_preemptions:
        driver.step()
    assert [r.request_id for r in driver.scheduler.running] == ["old"]
    order = []
    while driver.scheduler.has_work:
        driver.step()
        order += [r.request_id for r in driver.scheduler.running if r.request_id not in order]
    assert order == ["old", "young", "new"]
    for name, start in (("old", 1), ("young", 2)):
        assert driver.ids[name] == expected(prompt(8, start), 20)


def test_the_longest_waiting_of_several_preempted_resumes_first():
    driver = Driver(budget=100)
    driver.add(*(submit(f"r{i}", prompt(4, i), 9) for i in range(3)))
    driver.step()
    for _ in range(3):
        driver.scheduler.preempt_last()
    assert len(driver.scheduler.queue) == 3
    step = driver.step()
    assert [work.request.request_id for work in step.work] == ["r0", "r1", "r2"]


def test_a_newcomer_is_not_thrown_out_by_the_next_tokens_of_others():
    driver = Driver(pages=7)
    driver.add(
        submit("a", prompt(8), 5), submit("b", prompt(8, 2), 5), submit("c", prompt(8, 3), 5)
    )
    driver.step()
    # Seven pages hold three prompts of two; but then nobody could take a next token.
    assert [r.request_id for r in driver.scheduler.running] == ["a", "b"]
    driver.run()
    assert driver.scheduler.counters.num_preemptions == 0


def test_nobody_overtakes_a_large_request_at_the_head():
    driver = Driver(pages=12)
    driver.add(submit("running", prompt(20), 8), submit("large", prompt(40, 2), 2))
    driver.step()
    driver.add(submit("small", prompt(4, 3), 2))
    driver.step()
    assert [r.request_id for r in driver.scheduler.running] == ["running"]
    driver.run()
    assert next(iter(driver.ends)) == "running"
    assert driver.ids["large"] == expected(prompt(40, 2), 2)


def test_sch_16_submit_and_abort_in_one_tick():
    driver = Driver()
    driver.add(submit("a", prompt(9)))
    driver.abort("a")
    assert driver.ends["a"].finish_reason == "abort"
    assert not driver.step()
    driver.scheduler.check_idle()


@pytest.mark.parametrize("steps", range(12))
def test_abort_in_every_phase_gives_all_pages_back(steps):
    driver = Driver(budget=8, pages=16)
    driver.add(submit("a", prompt(30), 30), submit("b", prompt(30, 2), 30))
    for _ in range(steps):
        driver.step()
    if steps % 2:
        driver.scheduler.preempt_last()
    driver.abort("a")
    driver.abort("a")  # finished ids are ignored
    driver.abort("never seen")
    driver.abort("b")
    assert not driver.scheduler.has_work
    driver.scheduler.check_idle()
    assert {end.finish_reason for end in driver.ends.values()} == {"abort"}


def test_sch_17_clients_that_leave_free_their_seats():
    driver = Driver(seats=4)
    for i in range(50):
        driver.add(submit(f"r{i}", prompt(5, i), 100))
        driver.step()
        driver.abort(f"r{i}")
    assert driver.scheduler.stats().num_running == 0
    assert driver.scheduler.stats().num_free_pages == 64
    run_all(driver, submit("next", prompt(5)))


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [(511, 1, True), (512, 1, False), (513, 1, False), (512, 0, True), (513, 0, False)],
)
def test_sch_20_a_prompt_that_cannot_fit_is_refused_at_once(length, max_tokens, fits):
    driver = Driver(pages=200)
    command = submit("a", prompt(length), max_tokens)
    if fits:
        run_all(driver, command)
    else:
        with pytest.raises(Refused, match=f"{length} tokens; at most 512"):
            driver.add(command)
        assert not driver.scheduler.has_work


def test_sch_27_requests_up_to_exactly_all_pages_finish():
    for length, outputs in ((27, 1), (28, 4), (31, 1)):
        run_all(Driver(pages=8), submit("a", prompt(length), outputs))
    driver = Driver(pages=8)
    with pytest.raises(Refused, match="32 tokens; at most 32 fit"):
        driver.add(submit("a", prompt(32), 1))
    assert not driver.scheduler.has_work


def test_output_ends_with_length_where_the_pool_or_the_context_ends():
    for driver in (Driver(pages=8), Driver(max_model_len=32)):
        driver.add(submit("a", prompt(20), 500))
        driver.run()
        assert driver.ids["a"] == expected(prompt(20), 12)
        assert driver.ends["a"].finish_reason == "length"


def test_sch_24_the_queue_has_a_bound():
    driver = Driver(queue=10, seats=2)
    admitted = refused = 0
    for i in range(100):
        try:
            driver.add(submit(f"r{i}", prompt(3, i), 2))
            admitted += 1
        except Overloaded:
            refused += 1
    assert (admitted, refused) == (12, 88)  # as many as run and wait together
    driver.run()
    assert len(driver.ends) == 12
    run_all(driver, submit("later", prompt(3)))


def test_requests_in_flight_count_alike_whether_they_run_or_wait():
    driver = Driver(seats=1, queue=1)
    driver.add(submit("a", prompt(3)), submit("b", prompt(3)))
    for _ in range(3):
        with pytest.raises(Overloaded, match="2 requests are running or waiting"):
            driver.add(submit("c", prompt(3)))
        driver.step()
    driver.scheduler.preempt_last()
    with pytest.raises(Overloaded):
        driver.add(submit("c", prompt(3)))
    driver.abort("b")
    driver.add(submit("c", prompt(3)))
    driver.run()


def test_an_id_in_use_is_refused_and_its_owner_undisturbed():
    driver = Driver()
    driver.add(submit("a", prompt(9), 5))
    driver.step()
    with pytest.raises(DuplicateId):
        driver.add(submit("a", prompt(3), 2))
    driver.run()
    assert driver.ids["a"] == expected(prompt(9), 5)
    driver.ends.clear()
    run_all(driver, submit("a", prompt(3), 2))  # free again once it is finished


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [1, 512]}, "from 0 to 511"),
        ({"prompt": [-1]}, "from 0 to 511"),
        ({"stop_token_ids": [512]}, "from 0 to 511"),
        ({"logit_bias": {-5: 1.0}}, "from 0 to 511"),
        ({"max_tokens": -1}, "must not be negative"),
    ],
)
def test_ids_outside_the_vocabulary_never_reach_a_step(settings, message):
    driver = Driver()
    with pytest.raises(Refused, match=message):
        driver.add(submit("a", **{"prompt": [1], **settings}))
    assert not driver.scheduler.has_work


def test_stop_ids_end_a_request_but_not_before_min_tokens():
    ids = expected(prompt(6), 10)
    for min_tokens in range(6):
        driver = Driver()
        driver.add(submit("a", prompt(6), 10, stop_token_ids=[ids[2], 0], min_tokens=min_tokens))
        driver.run()
        honoured = min_tokens <= 2
        assert driver.ids["a"] == (ids[:3] if honoured else ids)
        assert driver.ends["a"].finish_reason == ("stop" if honoured else "length")


def test_a_stop_id_as_the_last_token_is_a_stop():
    ids = expected(prompt(6), 3)
    driver = Driver()
    driver.add(submit("a", prompt(6), 3, stop_token_ids=[ids[2]]))
    driver.run()
    assert driver.ends["a"].finish_reason == "stop"


@pytest.mark.parametrize("budget", [8, 10, 64])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("preempt_after", [None, 1, 2])
def test_prompt_scores_come_once_and_whole(budget, max_tokens, preempt_after):
    driver = Driver(budget=budget)
    driver.add(submit("a", prompt(21), max_tokens, prompt_logprobs=2, logprobs=1))
    for _ in range(preempt_after or 0):
        driver.step()
    if preempt_after and driver.scheduler.running:
        driver.scheduler.preempt_last()
    driver.run()
    seen = driver.outputs
    (scores,) = [o.prompt_logprobs for o in seen if o.prompt_logprobs is not None]
    assert [entry.rank - 1 for entry in scores] == prompt(21)[1:]
    assert all(len(entry.top_ids) == 2 for entry in scores)
    ids = [entry.rank - 1 for o in seen for entry in o.logprobs or []]
    assert ids == driver.ids["a"] == expected(prompt(21), max_tokens)
    assert driver.ends["a"].finish_reason == "length"
    assert driver.scheduler.stats().num_prompt_tokens == 21


def test_num_20_a_row_without_numbers_fails_alone():
    driver = Driver(plan=Plan(poison_token=499))
    good = [submit(f"r{i}", prompt(6, i), 8) for i in range(3)]
    driver.add(good[0], submit("bad", [5, 499, 5], 8), *good[1:])
    driver.run()
    assert driver.ends["bad"].finish_reason == "error"
    assert driver.ends["bad"].error_kind == "internal"
    assert "non-finite" in (driver.ends["bad"].error or "")
    for command in good:
        if 499 not in command.prompt_ids + driver.ids[command.request_id]:
            assert driver.ids[command.request_id] == expected(command.prompt_ids, 8)
            assert driver.ends[command.request_id].finish_reason == "length"


def test_a_failed_step_ends_its_requests_and_only_those():
    driver = Driver(seats=2)
    driver.add(*(submit(f"r{i}", prompt(4, i), 5) for i in range(3)))
    step = driver.scheduler.schedule()
    lost = [SequenceOutput(error="planned") for _ in step.work]
    driver.take(driver.scheduler.commit(step, lost))
    assert set(driver.ends) == {"r0", "r1"}
    driver.scheduler.check()
    driver.run()
    assert driver.ids["r2"] == expected(prompt(4, 2), 5)


def test_the_books_notice_what_is_wrong():
    driver = Driver()
    driver.add(submit("a", prompt(9), 5))
    driver.step()
    (request,) = driver.scheduler.running
    assert request.state is State.RUNNING and request.phase is Phase.DECODE
    lost = request.table.pages.pop()
    with pytest.raises(RuntimeError, match="reference counts"):
        driver.scheduler.check()
    request.table.pages.append(lost)
    driver.scheduler.check()
    driver.scheduler.cache.grow(request.table, 20)
    with pytest.raises(RuntimeError, match="does not need"):
        driver.scheduler.check()
    driver.scheduler.running.clear()
    with pytest.raises(RuntimeError, match="two places"):
        driver.scheduler.check()
    unfair = Driver()
    unfair.add(submit("a", prompt(9), 5), submit("b", prompt(9), 5))
    unfair.step()
    unfair.scheduler.running.reverse()
    with pytest.raises(RuntimeError, match="overtook"):
        unfair.scheduler.check()
    idle = Driver()
    idle.scheduler.cache.pool.take(1)
    with pytest.raises(RuntimeError, match="idle, yet 1 pages are held"):
        idle.scheduler.check_idle()


@pytest.mark.parametrize("budget", [None, 7])
def test_a_budget_must_cover_every_seat(budget):
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(config, KvCache(8, 4), 32, 512)


def test_scheduling_needs_no_torch():
    modules = ("scheduler", "policy", "request", "batch", "stats", "messages", "process", "channel")
    code = "; ".join(f"import minidsa.scheduler.{name}" for name in modules)
    code += "; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_outputs_say_how_long_a_request_waited_and_steps_are_counted_by_size():
    now = [5.0]
    cache = KvCache(64, 4)
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8)
    scheduler = Scheduler(config, cache, 128, 512, clock=lambda: now[0])
    runner = FakeRunner(64, 4, Plan())
    scheduler.add(submit("a", prompt(9), 2))
    scheduler.add(submit("b", prompt(3), 1))
    waits = {}
    while step := scheduler.schedule():
        now[0] += 1.0
        for output in scheduler.commit(step, launch(runner, step)):
            waits.setdefault(output.request_id, []).append(output.queue_seconds)
    assert waits == {"a": [0.0, None], "b": [3.0]}
    stats = scheduler.stats()
    # Prompts of 9 and 3 tokens in chunks of at most 8, and one decode.
    assert stats.num_step_tokens == 9 + 1 + 3 and stats.num_steps == 4
    assert dict(zip(STEP_SIZES, stats.step_sizes, strict=False)) == {1: 2, 8: 2} | dict.fromkeys(
        STEP_SIZES[2:], 0
    )
