"""A request's tokens are its own: mates, chunks, page sizes and preemption do not change them.

The lengths straddle index_topk (16), so dense and sparse steps, and steps with both, are all met.
"""

import random

import pytest
import torch

from checkpoints import NAN_TOKEN, t_cpu, t_eos, t_nan
from minidsa.scheduler.messages import Submit
from model_driver import ModelDriver, Settings
from scheduler_fakes import submit

LENGTHS = (1, 3, 7, 8, 9, 15, 16, 17, 24, 40, 64, 90)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(80, 512) for _ in range(length)]


def requests(count: int, seed: int = 0) -> list[Submit]:
    """Half greedy, half sampled with seeds of their own."""
    rng = random.Random(seed)
    submits = []
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        outputs = rng.choice([4, 9, 20])
        command = submit(f"r{i}", prompt(length, seed * 1000 + i), outputs)
        if i % 2:
            command = with_sampling(command, seed=i)
        submits.append(command)
    return submits


def with_sampling(command: Submit, seed: int) -> Submit:
    fields = {f: getattr(command.params, f) for f in command.params.__struct_fields__}
    params = type(command.params)(**fields | {"temperature": 1.0, "top_p": 0.95, "seed": seed})
    return Submit(command.request_id, command.prompt_ids, params)


def alone(submits: list[Submit]) -> dict[str, list[int]]:
    """Each request in an engine of its own."""
    answers = {}
    for command in submits:
        driver = ModelDriver(t_cpu(), Settings())
        answers |= driver.run([command]).ids
    return answers


@pytest.fixture(scope="module")
def solo() -> dict[str, list[int]]:
    return alone(requests(32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(page_size=4, budget=32),
        Settings(page_size=16, budget=40),
        Settings(page_size=64, pages=64, budget=300),
        Settings(seats=2, budget=7),
        Settings(seats=5, budget=11, page_size=3),
        Settings(preempt_every=3),
        Settings(preempt_every=2, seats=4),
        Settings(pages=16),
        Settings(pages=30, page_size=4, seats=6, preempt_every=5),
    ],
    ids=str,
)
def test_sch_26_sch_28_ids_do_not_depend_on_the_settings(solo, settings):
    driver = ModelDriver(t_cpu(), settings)
    assert driver.run(requests(32)).ids == solo
    small_pool = settings.pages < 40
    if settings.preempt_every or small_pool:
        assert driver.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 32])
def test_num_18_mates_that_come_at_any_time_change_nothing(solo, size):
    chosen = requests(32)[:: 32 // size][:size]
    rng = random.Random(size)
    arrive = {i: rng.randrange(12) for i in range(size)}
    answers = ModelDriver(t_cpu(), Settings(budget=33)).run(chosen, arrive)
    assert answers.ids == {command.request_id: solo[command.request_id] for command in chosen}


@pytest.mark.parametrize("lengths", [(1, 7), (1, 1), (7, 7), (16, 17)])
def test_num_15_two_requests_in_one_step(lengths):
    submits = [submit(f"r{i}", prompt(n, i), 6) for i, n in enumerate(lengths)]
    assert ModelDriver(t_cpu(), Settings()).run(submits).ids == alone(submits)


@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(page_size=3, budget=40), Settings(pages=20, preempt_every=5)],
    ids=str,
)
def test_sch_29_a_cached_prefix_changes_no_id(settings):
    stem = prompt(60, 7)
    ends = [(10, 1), (17, 2), (33, 3), (60, 4), (60, 5), (59, 6)]
    submits = [
        submit(f"r{i}", stem[:n] + prompt(n % 5, seed), 9) for i, (n, seed) in enumerate(ends)
    ]
    driver = ModelDriver(t_cpu(), settings)
    cold = alone(submits)
    for name in ("cold", "warm"):
        assert driver.run(submits).ids == cold, name
    assert driver.scheduler.counters.num_prefix_hits > 0


def test_requests_that_end_early_free_their_seats():
    ends = list(range(1, 512, 16))
    submits = [submit(f"r{i}", prompt(12, i), 40, stop_token_ids=ends) for i in range(12)]
    answers = ModelDriver(t_eos(), Settings(seats=3)).run(submits)
    reasons = [end.finish_reason for end in answers.ends.values()]
    assert len(reasons) == 12
    assert "stop" in reasons
    for name, end in answers.ends.items():
        ids = answers.ids[name]
        assert not set(ids[:-1]) & set(ends)
        assert (end.finish_reason == "stop") == (ids[-1] in ends)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_num_20_a_row_of_nan_harms_nobody_else(phase):
    bias = {NAN_TOKEN: 1000.0} if phase == "decode" else {}
    poisoned = prompt(20, 99) if phase == "decode" else [*prompt(10, 99), NAN_TOKEN, 80, 81]
    bad = submit("bad", poisoned, 8, logit_bias=bias)
    good = [submit(f"r{i}", prompt(10 + 5 * i, i), 12) for i in range(7)]
    driver = ModelDriver(t_nan(), Settings())
    answers = driver.run([*good[:3], bad, *good[3:]])
    assert answers.ends["bad"].finish_reason == "error"
    assert "non-finite" in (answers.ends["bad"].error or "")
    clean = ModelDriver(t_nan(), Settings()).run(good)
    assert {k: v for k, v in answers.ids.items() if k != "bad"} == clean.ids
    # The pages the bad request wrote NaN into serve the next ones.
    assert driver.run(good).ids == clean.ids


def test_logprobs_do_not_depend_on_chunks_pages_or_preemption():
    command = submit("a", prompt(50, 5), 6, logprobs=3, prompt_logprobs=2)
    whole = ModelDriver(t_cpu(), Settings()).run([command])
    assert len(whole.logprobs["a"]) == 49 + 6
    for settings in (Settings(budget=9, seats=1), Settings(page_size=5, preempt_every=4)):
        other = ModelDriver(t_cpu(), settings).run([command])
        for a, b in zip(whole.logprobs["a"], other.logprobs["a"], strict=True):
            assert (a.rank, a.top_ids) == (b.rank, b.top_ids)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("reuse", [False, True])
def test_sch_05_no_row_of_a_freed_page_is_read_before_it_is_written_anew(reuse):
    """The driver turns both kinds of rows of a freed page to NaN; a page serves many requests."""
    asked = requests(6, seed=5)
    wanted = alone(asked)
    driver = ModelDriver(t_cpu(), Settings(pages=15, seats=3, budget=24, reuse=reuse))
    for _ in range(3):
        assert driver.run(asked).ids == wanted
