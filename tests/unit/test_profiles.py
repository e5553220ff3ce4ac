"""Profiles of the engine: routes behind a setting, and a trace of what was computed."""

import dataclasses
import gzip
import json

import pytest
import torch

from minidsa.configs.setting_error import SettingError
from minidsa.scheduler.messages import StartProfile, StopProfile
from minidsa.scheduler.profiling import Profiler
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
