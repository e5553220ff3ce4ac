"""Random weights in place of a checkpoint's: a folder without weights serves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from checkpoints import T_CPU, T_WIDE
from minidsa.configs.engine import CacheConfig, EngineConfig, SpeculativeConfig
from minidsa.configs.sampling import SamplingParams
from minidsa.configs.setting_error import SettingError
from minidsa.model.config import parse_config
from minidsa.model.decode_graphs import DecodeGraphs
from minidsa.model.dummy_weights import random_model
from minidsa.model.loading import check_start
from minidsa.model.names import name_table
from minidsa.model.sequence import SampleInput, SequenceInput

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(dict(T_CPU)))
    return tmp_path


def test_a_folder_of_a_configuration_alone_computes_and_says_that_it_is_random(folder):
    start = check_start(EngineConfig(model=str(folder), device="cpu", load_format="dummy"))
    loaded = start.load()
    sample = SampleInput(SamplingParams(max_tokens=1, seed=0, temperature=0.0), [1, 2, 3], [])
    [output] = loaded.runner.run([SequenceInput([1, 2, 3], 0, [1], sample)], 1)
    assert output.error is None and len(output.token_ids) == 1
    assert any("random" in note for note in loaded.info.notes)
    assert loaded.info.speculative == "mtp"


def test_without_it_the_weights_are_asked_for(folder):
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        check_start(EngineConfig(model=str(folder), device="cpu"))


def test_an_mtp_layer_is_not_made_up(folder):
    raw = dict(T_CPU) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(raw))
    speculative = SpeculativeConfig(method="mtp")
    config = EngineConfig(
        model=str(folder), device="cpu", load_format="dummy", speculative=speculative
    )
    with pytest.raises((SettingError, ValueError), match="mtp"):
        check_start(config)


def test_the_same_seed_makes_the_same_weights():
    config = parse_config(T_CPU)
    first, second, other = (
        name_table(random_model(config, torch.float32, CPU, seed)) for seed in (3, 3, 4)
    )
    for name, entry in first.items():
        assert torch.equal(entry.target, second[name].target), name
    assert not torch.equal(first["lm_head.weight"].target, other["lm_head.weight"].target)


def test_fp8_weights_are_numbers_of_the_size_of_others():
    model = random_model(parse_config(T_WIDE), torch.bfloat16, CPU, keeps_fp8=True)
    scaled = [entry for entry in name_table(model).values() if entry.scales is not None]
    assert scaled
    for entry in scaled:
        assert entry.scales is not None
        width = entry.target.shape[-1]
        values = entry.target.float() * entry.scales.flatten()[0]
        assert values.isfinite().all()
        assert 0.5 < values.square().mean().item() * width < 2


def test_rows_of_random_weights_are_not_kept(folder):
    cache = CacheConfig(session_dir=str(folder))
    with pytest.raises(SettingError, match="session_dir"):
        check_start(EngineConfig(model=str(folder), load_format="dummy", cache=cache))


class Capturing:
    """Graphs as they are on a GPU, seen from a start: what they are asked to prepare."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, list[int]]] = []

    def prepare(self, requests: int, width: int, lengths: list[int]) -> Iterator[str]:
        self.asked.append((requests, width, lengths))
        yield f"{requests} requests"


def test_a_start_prepares_what_it_will_replay(folder):
    """Widths of plain and of verify steps, lengths on both sides of what is selected."""
    config = EngineConfig(model=str(folder), device="cpu", load_format="dummy")
    loaded = check_start(config).load()
    beats: list[int] = []
    loaded.prepare(lambda: beats.append(1))
    assert beats == []
    capturing = Capturing()
    loaded.runner.graphs = cast("DecodeGraphs", capturing)
    loaded.prepare(lambda: beats.append(1))
    drafts, longest = loaded.info.num_speculative_tokens, loaded.info.max_model_len
    lengths = sorted({min(longest, 1024), longest})
    requests = loaded.info.max_num_seqs
    assert capturing.asked == [(requests, 1, lengths), (requests, 1 + drafts, lengths)]
    # In front of each, and behind the last, since what follows has a limit of its own.
    assert len(beats) == 3
