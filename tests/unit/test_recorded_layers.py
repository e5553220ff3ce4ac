"""Recorded layers give the bits of the layers they record, in answers and in the cache."""

import dataclasses

import pytest
import torch

from checkpoints import t_cpu, t_markov
from minidsa.model import recorded_layers
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.recorded_layers import MOST_TOKENS, RecordedLayers
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
    assert names == {"forward", "guess"} if settings.drafter == "mtp" else {"forward"}


def test_only_small_steps_of_decodes_are_recorded():
    """A prompt of few tokens has another length each time; of many, Python's part is small."""
    _, driver = run(Settings(recorded=True), len(LENGTHS))
    assert driver.runner.recorded is not None
    counts = {count for _, count in driver.runner.recorded.recorded}
    assert counts and max(counts) <= min(MOST_TOKENS, len(LENGTHS))
    _, wide = run(Settings(recorded=True, drafter="mtp", num_drafts=3), len(LENGTHS))
    assert wide.runner.recorded is not None
    assert all(count <= MOST_TOKENS for _, count in wide.runner.recorded.recorded)


def test_only_what_is_the_same_for_all_tokens_is_recorded(monkeypatch):
    driver = ModelDriver(t_cpu(), Settings())
    model, storage = driver.runner.model, driver.runner.storage
    assert RecordedLayers.suit(model, storage)
    unpacked = DeepseekModel(model.config, torch.float32, torch.device("cpu"))
    assert not RecordedLayers.suit(unpacked, storage)
    half = DeepseekModel(model.config, torch.bfloat16, torch.device("cpu"))
    assert not RecordedLayers.suit(half, storage)
    monkeypatch.setattr(recorded_layers.sys, "version_info", (3, 14))
    assert not RecordedLayers.suit(model, storage)
