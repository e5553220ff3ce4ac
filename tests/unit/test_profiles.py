"""Profiles of the engine: routes behind a setting, and a trace of what was computed."""

import dataclasses
import gzip
import json
import threading
from pathlib import Path

import pytest
import torch

from minidsa.configs.setting_error import SettingError
from minidsa.scheduler.messages import StartProfile, StopProfile
from minidsa.scheduler.profiling import RECORDED_SECONDS, Profiler
from minidsa.scheduler.worker import _folder
from scripted_engine import server_config, serving


def test_a_trace_is_written_between_start_and_stop(tmp_path):
    profiler = Profiler(tmp_path)
    assert not profiler.answer(StopProfile()).done
    assert profiler.answer(StartProfile()).done
    assert "already" in profiler.answer(StartProfile()).error
    torch.matmul(torch.ones(3, 3), torch.ones(3, 3))
    answer = profiler.answer(StopProfile())
    assert answer.done
    with gzip.open(tmp_path / answer.file) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::matmul" in names


def test_a_recording_that_is_forgotten_ends_by_itself(tmp_path):
    now = [0.0]
    profiler = Profiler(tmp_path, clock=lambda: now[0])
    assert profiler.answer(StartProfile()).done
    profiler.check()
    torch.matmul(torch.ones(3, 3), torch.ones(3, 3))
    now[0] = RECORDED_SECONDS
    profiler.check()
    torch.sigmoid(torch.ones(3))
    assert "stop it first" in profiler.answer(StartProfile()).error
    answer = profiler.answer(StopProfile())
    assert answer.done
    with gzip.open(tmp_path / answer.file) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::matmul" in names and "aten::sigmoid" not in names
    assert profiler.answer(StartProfile()).done and profiler.answer(StopProfile()).done


def test_a_recording_that_cannot_be_ended_is_lost_alone(tmp_path, monkeypatch, caplog):
    now = [0.0]
    profiler = Profiler(tmp_path, clock=lambda: now[0])
    assert profiler.answer(StartProfile()).done
    recording = profiler._recording

    def fail(self):
        raise RuntimeError("the device says no")

    now[0] = RECORDED_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "stop", fail)
        profiler.check()
    recording.stop()
    assert "the device says no" in caplog.text
    assert "no profile" in profiler.answer(StopProfile()).error


def test_the_engine_says_that_it_is_alive_while_a_trace_is_written(tmp_path, monkeypatch):
    calls = []
    profiler = Profiler(tmp_path, alive=lambda: calls.append(1))
    assert profiler.answer(StartProfile()).done
    written = threading.Event()

    def slow(self, path):
        Path(path).write_bytes(b"a part of it")
        while len(calls) < 3:
            written.wait(0.01)
        raise OSError("the disk is full")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", slow)
    assert "the disk is full" in profiler.answer(StopProfile()).error
    assert len(calls) >= 3
    assert not list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_recorded(tmp_path):
    assert "--profile-dir" in Profiler(None).answer(StartProfile()).error
    assert _folder("profile_dir", None) is None
    folder = tmp_path / "new" / "one"
    assert _folder("profile_dir", str(folder)) == folder and folder.is_dir()
    (tmp_path / "file").write_text("")
    for value in ("", str(tmp_path / "file")):
        with pytest.raises(SettingError, match="profile_dir"):
            _folder("profile_dir", value)


async def test_the_routes_exist_where_a_folder_is_configured(tmp_path):
    config = server_config()
    engine = dataclasses.replace(config.engine, profile_dir=str(tmp_path))
    async with serving(config=dataclasses.replace(config, engine=engine)) as bed:
        post = bed.client.post
        assert (await post("/start_profile")).json() == {"recording": True}
        refused = await post("/start_profile")
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "profile_refused"
        assert (await post("/stop_profile")).json() == {"file": "trace.json.gz"}
        assert str(tmp_path) not in (await bed.client.get("/server_info")).text
    async with serving() as bed:
        assert (await bed.client.post("/start_profile")).status_code == 404
