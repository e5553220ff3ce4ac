"""The loop: commands in, outputs out, and what a failure costs."""

import pytest

from minidsa.scheduler.engine import Engine
from minidsa.scheduler.messages import Abort, Heartbeat, Outputs, Shutdown
from minidsa.scheduler.recovery import EngineBroken
from minidsa.scheduler.worker import warm_up
from scheduler_fakes import Driver, Plan, expected, submit
from scripted_link import CountingWatchdog, ScriptedLink


def serve(turns, plan=None, **settings):
    driver = Driver(plan=plan, **settings)
    link, watchdog = ScriptedLink(turns), CountingWatchdog()
    engine = Engine(driver.runner, driver.scheduler, link, watchdog)
    return engine, link, driver, watchdog


def test_tokens_stream_step_by_step_and_end_once():
    engine, link, driver, watchdog = serve([[submit("a", [1, 2, 3], 5)], [submit("b", [4], 3)]])
    engine.run()
    assert link.ids("a") == expected([1, 2, 3], 5)
    assert link.ids("b") == expected([4], 3)
    assert all(len(o.token_ids) == 1 for o in link.outputs())
    assert [o.finish_reason for o in link.outputs("a")] == [None] * 4 + ["length"]
    assert watchdog.restarts == len(link.timeouts)
    driver.scheduler.check_idle()


def test_it_waits_only_while_idle_and_then_its_heart_beats():
    engine, link, _, _ = serve([[], [submit("a", [1], 2)]])
    engine.run()
    assert link.timeouts[:4] == [0.2, 0.2, 0.0, 0.2]
    beats = [isinstance(event, Heartbeat) for event in link.events]
    assert beats == [True, False, False, True, True]
    stats = link.events[-1].stats
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generation_tokens) == (2, 1, 2)


def test_every_step_says_that_the_engine_is_alive():
    engine, link, _, _ = serve([[submit("a", list(range(40)), 1)]], budget=8)
    engine.run()
    busy = [event for event in link.events if isinstance(event, Outputs)]
    assert [len(event.outputs) for event in busy] == [0, 0, 0, 0, 1]
    assert busy[0].stats.num_running == 1


def test_sch_16_submit_and_abort_in_one_turn():
    engine, link, driver, _ = serve([[submit("a", [1, 2]), Abort("a"), Abort("unknown")]])
    engine.run()
    (output,) = link.outputs()
    assert (output.request_id, output.finish_reason) == ("a", "abort")
    assert driver.runner.num_steps == 0


def test_pages_are_free_within_two_steps_of_an_abort():
    engine, link, _, _ = serve([[submit("a", list(range(20)), 50)], [], [], [Abort("a")]])
    engine.run()
    assert link.ends()["a"].finish_reason == "abort"
    position = next(
        i
        for i, e in enumerate(link.events)
        if isinstance(e, Outputs) and e.outputs and e.outputs[0].finish_reason
    )
    assert link.events[position].stats.num_free_pages == 64


@pytest.mark.parametrize(
    ("command", "kind", "text"),
    [
        (submit("bad", [1] * 600), "invalid", "600 tokens"),
        (submit("bad", [600]), "invalid", "0 to 511"),
        (submit("bad", []), "invalid", "no tokens"),
    ],
)
def test_a_refusal_is_answered_at_once(command, kind, text):
    engine, link, _, _ = serve([[submit("good", [1], 3), command]])
    engine.run()
    bad = link.ends()["bad"]
    assert (bad.finish_reason, bad.error_kind) == ("error", kind) and text in bad.error
    assert link.ids("good") == expected([1], 3)


def test_a_full_queue_is_told_apart_from_a_bad_request():
    turns = [[submit(f"r{i}", [i], 2) for i in range(6)]]
    engine, link, _, _ = serve(turns, seats=1, queue=1)
    engine.run()
    kinds = [link.ends()[f"r{i}"].error_kind for i in range(6)]
    assert kinds == [None, None, *["overloaded"] * 4]


def test_an_id_in_use_gets_no_answer_of_its_own(caplog):
    engine, link, _, _ = serve([[submit("a", [1, 2], 4)], [submit("a", [3], 4)]])
    engine.run()
    assert link.ids("a") == expected([1, 2], 4)
    assert "'a' is in use" in caplog.text


def test_shutdown_leaves_at_once():
    engine, link, driver, _ = serve([[submit("a", [1], 50)], [], [Shutdown()]])
    engine.run()
    assert driver.runner.num_steps == 2 and link.ends() == {}


@pytest.mark.parametrize("step", range(1, 21))
@pytest.mark.parametrize("requests", [1, 8])
def test_ops_06_a_step_that_fails_once_is_computed_again(step, requests, caplog):
    first = [submit(f"r{i}", [i, i + 1, i + 2], 20) for i in range(requests)]
    turns = [first, *[[] for _ in range(step)], [submit("after", [7, 7], 5)]]
    engine, link, driver, _ = serve(turns, Plan(fail_steps=frozenset({step})))
    engine.run()
    for command in (*first, turns[-1][0]):
        count = command.params.max_tokens
        assert link.ids(command.request_id) == expected(command.prompt_ids, count)
    assert len(link.ends()) == requests + 1 == len([o for o in link.outputs() if o.finish_reason])
    assert f"planned failure of step {step}" in caplog.text
    driver.scheduler.check_idle()


@pytest.mark.parametrize("budget", [8, 64])
def test_ops_06_only_the_request_that_fails_alone_ends_with_an_error(budget, caplog):
    mates = [submit(f"r{i}", [i, i + 1, i + 2], 20) for i in range(7)]
    bad = submit("bad", [*range(20), 511, 3], 5)
    engine, link, driver, watchdog = serve(
        [mates[:3], [bad, *mates[3:]]], Plan(fatal_token=511), budget=budget
    )
    engine.run()
    end = link.ends()["bad"]
    assert (end.finish_reason, end.error_kind) == ("error", "internal")
    assert "request bad fails alone" in caplog.text
    for command in mates:
        if 511 not in expected(command.prompt_ids, 20):
            assert link.ids(command.request_id) == expected(command.prompt_ids, 20)
    assert watchdog.restarts > len(link.timeouts)  # each try may take as long as a step
    driver.scheduler.check_idle()


@pytest.mark.parametrize("mates", [0, 3])
def test_a_client_that_repeats_a_fatal_request_does_not_end_the_engine(mates, caplog):
    others = [submit(f"r{i}", [i], 40) for i in range(mates)]
    retries = [[submit(f"bad{i}", [511, i], 5)] for i in range(10)]
    engine, link, driver, _ = serve([others, *retries], Plan(fatal_token=511))
    engine.run()
    assert all(link.ends()[f"bad{i}"].error_kind == "internal" for i in range(10))
    for command in others:
        if 511 not in expected(command.prompt_ids, 40):
            assert link.ids(command.request_id) == expected(command.prompt_ids, 40)
    driver.scheduler.check_idle()


def test_an_engine_that_cannot_compute_one_token_is_broken(caplog):
    plan = Plan(fail_forever_from=2)
    turns = [[submit("a", [1], 9)], [submit("b", [2], 9)], [submit("c", [3], 9)]]
    engine, link, _, _ = serve(turns, plan)
    with pytest.raises(EngineBroken, match=r"probe of one token, .* step 3"):
        engine.run()
    assert link.ids("a") == expected([1], 1) and not link.ends()
    assert "planned failure of step 2" in caplog.text


def test_failures_apart_do_not_add_up(caplog):
    # A failure is followed by the probe and by the step again, two steps without a failure.
    plan = Plan(fail_steps=frozenset({1, 4, 7}))
    turns = [[submit(f"r{i}", [i], 2)] for i in range(6)]
    engine, link, _, _ = serve(turns, plan, seats=1)
    engine.run()
    assert [end.finish_reason for end in link.ends().values()] == ["length"] * 6
    assert "planned failure of step 7" in caplog.text


def test_broken_books_end_the_engine_whatever_runs():
    engine, _, driver, _ = serve([[], []])
    driver.scheduler.cache.pool.take(1)
    with pytest.raises(RuntimeError, match="idle, yet 1 pages"):
        engine.run()


def test_a_runner_that_loses_an_output_is_a_failed_step(caplog):
    turns = [[submit("a", [1], 2), submit("b", [2], 2)], [], [submit("c", [3], 2)]]
    engine, link, _, _ = serve(turns, Plan(lose_step=1))
    engine.run()
    assert [end.finish_reason for end in link.ends().values()] == ["length"] * 3
    assert "1 outputs for 2 works" in caplog.text


def test_warm_up_prefills_and_decodes_and_leaves_nothing_behind():
    driver = Driver()
    warm_up(driver.runner, driver.scheduler)
    assert driver.runner.batches == [[16], [1]]
    assert not driver.scheduler.has_work
    driver.scheduler.check_idle()


@pytest.mark.parametrize("longest", [2, 3, 5])
def test_warm_up_fits_the_smallest_context(longest):
    driver = Driver(max_model_len=longest)
    warm_up(driver.runner, driver.scheduler)
    assert driver.runner.batches[0] == [max(1, longest - 2)]


def test_ops_04_a_warm_up_without_numbers_is_no_readiness():
    driver = Driver(plan=Plan(poison_token=0))
    with pytest.raises(EngineBroken, match=r"warm-up pass failed: .*non-finite"):
        warm_up(driver.runner, driver.scheduler)
