"""`minidsa verify`: what is measured, and that a checkpoint of ours passes."""

import math

import pytest
import torch

from minidsa.configs.engine import CacheConfig, EngineConfig
from minidsa.configs.logprobs import TokenLogprobs
from minidsa.configs.setting_error import SettingError
from minidsa.scheduler.verify import Measure, Texts, measures, verify
from minidsa.server.cli import main
from minidsa.server.commands import EMBEDDED


def scores_of(logprobs_TV: torch.Tensor, token_ids: list[int]) -> list[TokenLogprobs]:
    tops = logprobs_TV.topk(3)
    return [
        TokenLogprobs(row[token].item(), 1, ids.tolist(), values.tolist())
        for row, token, ids, values in zip(
            logprobs_TV, token_ids, tops.indices, tops.values, strict=True
        )
    ]


def found(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Measure]:
    ids = [0, 3, 1, 4]
    made = measures([ids], [scores_of(ours, ids[1:])], [theirs], 1e-3)
    return {measure.name: measure for measure in made}


def test_equal_scores_agree_and_others_do_not():
    theirs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    same = found(theirs, theirs)
    assert all(measure.is_met for measure in same.values())
    assert same["mean logprob distance"].value == 0
    assert same["greedy agreement"].value == same["top-20 overlap"].value == 1
    other = found((-theirs).log_softmax(-1), theirs)
    assert not other["mean logprob distance"].is_met
    assert not other["greedy agreement"].is_met
    assert other["top-20 overlap"].value < 1
    assert "FAILED" in str(other["greedy agreement"])


def test_ties_agree_and_nan_does_not():
    tied = torch.zeros(3, 8).log_softmax(-1)
    ours = tied + torch.linspace(0, 1e-5, 8)
    assert found(ours, tied)["greedy agreement"].value == 1
    assert not Measure("distance", math.nan, 1.0).is_met
    assert not Measure("agreement", math.nan, 0.5, is_floor=True).is_met


def test_the_small_checkpoint_agrees_with_transformers():
    """Past its index_topk, so that selections count too."""
    said: list[str] = []
    config = EngineConfig(model=str(EMBEDDED), num_threads=1, cache=CacheConfig(num_pages=64))
    assert verify(config, Texts(1, 160, first_id=0), None, said.append)
    assert len(said) == 5 and "transformers" in said[0]
    assert not verify(config, Texts(1, 20, first_id=0), 1e-12, said.append)


def test_random_weights_are_not_compared():
    config = EngineConfig(model=str(EMBEDDED), load_format="dummy")
    with pytest.raises(SettingError, match="load_format"):
        verify(config, Texts(1, 20, first_id=0), None, lambda line: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--tokens", "1"], "--tokens is too small"),
        (["verify", "--tolerance", "-1"], "--tolerance is -1.0"),
        (["verify", "--set", "port=1"], "verify does not use port"),
        (["verify", "--set", "engine.hang_timeout=1"], "does not use engine.hang_timeout"),
        (["generate", "x", "--set", "limits.max_sequences=1"], "does not use limits.max_sequences"),
        (["generate", "x", "--set", "engine.profile_dir=/p"], "does not use engine.profile_dir"),
        (["verify", "--seed", "1"], "unknown flag --seed"),
        (["verify", "--load-format", "dummy"], "unknown flag --load-format"),
        (["verify", "--tokenz", "8"], "did you mean --tokens"),
        (["generate", "x", "--file", "y"], "and not both"),
        (["generate", "--file", "/nowhere/at/all"], "No such file"),
        (["generate", "x", "--temperature", "5"], "temperature"),
        (["generate", "x", "--port", "5"], "unknown flag --port"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
