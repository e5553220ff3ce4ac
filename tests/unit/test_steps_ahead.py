"""Steps are started ahead whatever their tokens are chosen by, and every request says the same.

The first part has a device that computes as late as it may and no model; the second has the real
runner, over steps that stand for replayed ones.
"""

import random
from collections.abc import Container
from dataclasses import replace

import pytest

from checkpoints import t_cpu
from grammar_bed import EOS, control_id, params, small_compiler
from late_device import LateDevice
from minidsa.configs.sampling import SamplingParams
from minidsa.scheduler.engine import Engine
from minidsa.scheduler.grammar import GrammarCompiler, Matcher
from minidsa.scheduler.messages import RequestOutput, Submit
from minidsa.scheduler.pipeline import Pipeline
from minidsa.scheduler.recovery import REQUEST_FAILED
from minidsa.server import lark
from model_driver import ModelDriver, Settings
from sampling_runner import SamplingRunner
from scheduler_fakes import Driver
from scripted_link import CountingWatchdog, ScriptedLink

THINK_END = control_id("</think>")
JSON = r'start: "{" /[a-z0-9]{1,9}/ "}"'
THINKING = f"start: THOUGHTS {lark.token(THINK_END)} /[a-c]{{1,9}}/\nTHOUGHTS: " + (
    lark.text_without("</think>")
)
STOPS = list(range(60, 240))
KINDS = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 9, "top_p": 0.9},
    "stops": {"stop_token_ids": STOPS},
    "grammar": {"grammar": JSON},
    "drawn grammar": {"grammar": JSON, "temperature": 1.0, "logprobs": 1},
    "thinking under a grammar": {
        "grammar": THINKING,
        "thinking_budget": 4,
        "end_think_id": THINK_END,
    },
    "repetition_penalty": {"repetition_penalty": 3.0, "temperature": 0.5},
    "other penalties": {"frequency_penalty": 1.5, "presence_penalty": 1.0, "temperature": 0.5},
    "logit_bias": {"logit_bias": {7: 4.0, 9: 4.5, 11: 4.2}, "temperature": 1.0},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": STOPS},
    "thinking_budget": {"thinking_budget": 5, "end_think_id": THINK_END},
    "logprobs": {"logprobs": 3},
    "scores alone": {"logprobs": 0, "temperature": 1.0},
}


def request(name: str, kind: str, max_tokens: int = 14, seed: int = 0, **fields) -> Submit:
    asked = {"temperature": 0.0, "stop_token_ids": [EOS]} | KINDS[kind] | fields
    grammar = asked.pop("grammar", None)
    prompt = [80 + (17 * seed + 5 * i) % 400 for i in range(1 + seed % 7)]
    return Submit(name, prompt, params(max_tokens=max_tokens, seed=seed, **asked), grammar)


def driver_of(**settings) -> tuple[Driver, LateDevice]:
    """Its pipeline runs on the device."""
    driver = Driver(
        runner=SamplingRunner(settings.pop("pages", 64), settings.get("page_size", 4)),
        grammars=settings.pop("grammars", small_compiler()),
        **settings,
    )
    device = LateDevice(driver.runner)
    driver.pipeline = Pipeline(device, driver.scheduler)
    return driver, device


def said(outputs: list[RequestOutput], name: str) -> tuple:
    """All that a request was answered."""
    own = [output for output in outputs if output.request_id == name]
    ids = [token for output in own for token in output.token_ids]
    scores = [score for output in own for score in output.logprobs or ()]
    return ids, scores, own[-1].finish_reason, own[-1].error


def alone(command: Submit) -> tuple:
    """Its answer in the plain loop, with nobody beside it."""
    driver = Driver(runner=SamplingRunner(64, 4), grammars=small_compiler())
    driver.add(command)
    driver.run()
    return said(driver.outputs, command.request_id)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_kind_are_started_ahead(kind):
    commands = [request("a", kind, seed=1), request("b", kind, 10, seed=2)]
    driver, device = driver_of()
    driver.add(*commands)
    steps = driver.run()
    for command in commands:
        assert said(driver.outputs, command.request_id) == alone(command)
    # A prompt's token is waited for, and so is the first decode; every other step is ahead.
    assert device.num_ahead >= steps - 2
    if kind != "greedy":
        # What is asked for does change the answer.
        assert alone(commands[0]) != alone(request("a", "greedy", seed=1))


@pytest.mark.parametrize("seed", range(40))
def test_mixtures_say_the_same_however_late_they_are_computed(seed):
    """All kinds at once, with ends of all sorts, aborts, short pages and preemptions."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 8])
    driver, device = driver_of(
        page_size=page_size,
        pages=rng.randint(32 // page_size + 1, 90 // page_size),
        seats=rng.randint(1, 6),
        budget=rng.randint(6, 40),
        preempt_every=rng.choice([0, 0, 5]),
    )
    sent: dict[str, Submit] = {}
    for turn in range(60):
        if rng.random() < 0.3:
            kind = rng.choice(list(KINDS))
            command = request(f"r{turn}", kind, rng.randint(1, 20), rng.randrange(30))
            sent[command.request_id] = command
            driver.add(command)
        alive = sorted(set(sent) - set(driver.ends))
        if alive and rng.random() < 0.1:
            driver.abort(rng.choice(alive))
        driver.step()
    driver.run()
    assert device.num_ahead > 0
    for name, command in sent.items():
        found, whole = said(driver.outputs, name), alone(command)
        if driver.ends[name].finish_reason == "abort":
            ids, scores, *_ = found
            assert (ids, scores) == (whole[0][: len(ids)], whole[1][: len(scores)])
        else:
            assert found == whole


class Strict(Matcher):
    """Raises for a mask of a request that has ended, and for those of some numbers, from 1."""

    fails_at: Container[int] = ()
    num_asked = 0

    def mask(self) -> bytes:
        assert not self.is_complete, "a request that has ended is asked for a mask"
        self.num_asked += 1
        if self.num_asked in self.fails_at:
            raise RuntimeError("planned failure of a mask")
        return super().mask()


class StrictCompiler(GrammarCompiler):
    """As `small_compiler`, of strict matchers."""

    def __init__(self, fails_at: Container[int] = ()) -> None:
        self.__dict__ = dict(small_compiler().__dict__)
        self._fails_at = fails_at

    def compile(self, grammar: str, params: SamplingParams) -> Matcher:
        matcher = Strict.__new__(Strict)
        matcher.__dict__ = super().compile(grammar, params).__dict__
        matcher.fails_at = self._fails_at
        return matcher


def test_nothing_is_asked_about_a_request_that_has_ended():
    bound, mate = request("bound", "grammar", 40, seed=3), request("mate", "logprobs", 30, seed=4)
    driver, device = driver_of(grammars=StrictCompiler())
    driver.add(bound, mate)
    driver.run()
    assert driver.ends["bound"].finish_reason == "complete"
    assert device.num_ahead > 20
    for command in (bound, mate):
        assert said(driver.outputs, command.request_id) == alone(command)


@pytest.mark.parametrize("fails_at", [{1}, {2}, {3}, {6}, range(4, 999)])
def test_a_choice_that_raises_costs_nobody_but_whom_it_must(fails_at, caplog):
    """The step is computed again; a request whose choice always raises ends with an error."""
    bound, mate = request("bound", "grammar", 40, seed=3), request("mate", "logprobs", 30, seed=4)
    driver, device = driver_of(grammars=StrictCompiler(fails_at))
    link = ScriptedLink([[bound, mate]])
    Engine(device, driver.scheduler, link, CountingWatchdog()).run()
    driver.scheduler.check_idle()
    assert "planned failure of a mask" in caplog.text
    assert said(link.outputs(), "mate") == alone(mate)
    ids, scores, reason, error = said(link.outputs(), "bound")
    if len(fails_at) == 1:
        assert (ids, scores, reason, error) == alone(bound)
    else:
        assert (len(ids), reason, error) == (3, "error", REQUEST_FAILED)
    assert device.num_ahead > 20


@pytest.mark.parametrize("seed", range(3))
def test_the_runner_says_the_same_ahead(seed):
    """Of a real model, to the last bit of the scores."""
    commands = [request(f"{kind} {seed}", kind, seed=i) for i, kind in enumerate(KINDS, 20 * seed)]
    arrive = {i: (5 * i + seed) % 19 for i in range(len(commands))}
    settings = Settings(leads=True, seats=9, preempt_every=7 * (seed % 2))
    driver = ModelDriver(t_cpu(), settings, grammars=StrictCompiler())
    found = driver.run(commands, arrive)
    assert driver.num_ahead > 10
    plain = ModelDriver(t_cpu(), replace(settings, leads=False), grammars=StrictCompiler())
    expected = plain.run(commands, arrive)
    assert plain.num_ahead == 0
    assert (found.ids, found.logprobs) == (expected.ids, expected.logprobs)
    ends = {name: end.finish_reason for name, end in found.ends.items()}
    assert ends == {name: end.finish_reason for name, end in expected.ends.items()}
    assert {"stop", "complete", "length"} >= set(ends.values()) > {"length"}
