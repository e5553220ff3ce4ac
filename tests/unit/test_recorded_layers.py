"""Recorded layers give the bits of the layers they record, in answers and in the cache."""

import dataclasses
import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from checkpoints import t_cpu, t_many_index_heads, t_markov
from minidsa.attention.base import Plan
from minidsa.model import recorded_layers
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.inputs import Span, attention_batch
from minidsa.model.layers.linear import SMALL_STEP
from minidsa.model.recorded_layers import RecordedLayers, Recorder
from model_driver import Answers, ModelDriver, Settings
from scheduler_fakes import submit

LENGTHS = (1, 5, 15, 16, 17, 33)
OUTPUTS = 12


def run(settings: Settings, count: int) -> tuple[Answers, ModelDriver]:
    """Requests that begin below and above index_topk, and grow over it, with all their scores."""
    folder = t_cpu() if settings.drafter == "none" else t_markov()
    driver = ModelDriver(folder, settings)
    submits = [
        submit(f"r{i}", [80 + (7 * i + j) % 400 for j in range(length)], OUTPUTS, logprobs=2)
        for i, length in enumerate(LENGTHS[-count:])
    ]
    return driver.run(submits), driver


@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(drafter="mtp", num_drafts=1),
        Settings(drafter="mtp", num_drafts=3),
        Settings(page_size=3, preempt_every=4),
    ],
)
def test_ids_scores_and_rows_are_the_same(settings, count):
    plain, eager = run(settings, count)
    recorded, driver = run(dataclasses.replace(settings, recorded=True), count)
    assert recorded.ids == plain.ids
    assert recorded.logprobs == plain.logprobs
    pairs = zip(driver.runner.storage.planes(), eager.runner.storage.planes(), strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    assert driver.runner.recorded is not None
    names = {name for name, _ in driver.runner.recorded.recorded}
    assert names >= ({"forward", "guess"} if settings.drafter == "mtp" else {"forward"})


def test_one_recording_serves_any_number_of_tokens():
    """A single token has its own; prompts are not recorded, whatever their length."""
    plain, _ = run(Settings(drafter="mtp"), len(LENGTHS))
    answers, driver = run(Settings(drafter="mtp", recorded=True), len(LENGTHS))
    recorded = driver.runner.recorded
    assert answers.logprobs == plain.logprobs and recorded is not None
    assert len(recorded.recorded) == len(set(recorded.recorded)) <= 6
    model, backend = driver.runner.model, driver.runner.backend
    spans = [Span(0, 3, list(range(1, 9)))]
    ids_T = torch.tensor([90, 91, 92])
    extends = backend.plan(attention_batch(spans, 1, 8, model.device))
    assert recorded.forward(ids_T, extends) is None
    decodes = backend.plan(attention_batch(spans, 0, 8, model.device))
    with torch.inference_mode():
        found_TD = recorded.forward(ids_T, decodes)
        assert found_TD is not None
        assert torch.equal(found_TD, model.forward(ids_T, decodes, backend, driver.runner.storage))
        hidden_TD = model.forward(ids_T, decodes, backend, driver.runner.storage)
        layer = model.mtp_layer.layer.attention.index
        written = []
        for write in (recorded.write_guess_rows, partial(written_by_model, driver)):
            driver.runner.storage.latent_LSC[layer].zero_()
            write(ids_T, hidden_TD, decodes)
            written.append(driver.runner.storage.latent_LSC[layer].clone())
        assert torch.equal(*written) and written[0].any()


def test_a_recording_of_the_most_tokens_serves_fewer():
    """Whatever is cut into slices from so many elements on is not: slices would be the recorded."""
    runner = ModelDriver(t_many_index_heads(), Settings(recorded=True)).runner
    recorded = runner.recorded
    assert recorded is not None and 4 < recorded.most_tokens < 16
    for plane in runner.storage.planes():
        plane.normal_(generator=torch.Generator().manual_seed(0))
    for count in (recorded.most_tokens, 2, recorded.most_tokens - 1, 3):
        batch = attention_batch([Span(100, count, list(range(1, 41)))], 0, 8, runner.device)
        ids_T, plan = torch.arange(90, 90 + count), runner.backend.plan(batch)
        with torch.inference_mode():
            wanted_TD = runner.model.forward(ids_T, plan, runner.backend, runner.storage)
            found_TD = recorded.forward(ids_T, plan)
        assert found_TD is not None and torch.equal(found_TD, wanted_TD)


def test_a_recording_that_is_dropped_gives_its_weights_back():
    memory_DD = np.ones((64, 64), np.float32)
    weight_DD, kept = torch.from_numpy(memory_DD), weakref.ref(memory_DD)
    recorder = Recorder(partial(multiplied, weight_DD), [])
    for count in (2, 3):
        [found_TD] = recorder(torch.ones(count, 64))
        assert torch.equal(found_TD, torch.full((count, 64), 64.0))
    del recorder, weight_DD, memory_DD
    gc.collect()
    assert kept() is None


def multiplied(weight_DD: torch.Tensor, x_TD: torch.Tensor) -> tuple[torch.Tensor]:
    return (x_TD @ weight_DD,)


def written_by_model(
    driver: ModelDriver, ids_T: torch.Tensor, hidden_TD: torch.Tensor, plan: Plan
) -> None:
    runner = driver.runner
    runner.model.write_guess_rows(ids_T, hidden_TD, plan, runner.backend, runner.storage)


def test_only_what_is_the_same_for_all_tokens_is_recorded(monkeypatch):
    runner = ModelDriver(t_cpu(), Settings()).runner
    config, cpu = runner.model.config, torch.device("cpu")

    def most(model: DeepseekModel) -> int:
        return RecordedLayers(model, runner.backend, runner.storage).most_tokens

    assert 1 < most(runner.model) <= SMALL_STEP
    assert most(DeepseekModel(config, torch.float32, cpu)) == 0, "experts are not packed"
    assert most(DeepseekModel(config, torch.bfloat16, cpu)) == 0
    monkeypatch.setattr(recorded_layers.sys, "version_info", (3, 14))
    assert most(runner.model) == 0
