"""Saved prefixes: written, read with another page size, refused where they do not fit."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import t_cpu, t_tied
from minidsa.kv_cache.session_error import SessionError
from minidsa.kv_cache.session_file import SessionFiles, fingerprint
from minidsa.scheduler.messages import Answer, Handling, RestoreSession, SaveSession
from minidsa.scheduler.sessions import Sessions
from model_driver import ModelDriver, Settings
from scheduler_fakes import submit
from scripted_engine import server_config, serving

PROMPT = [80 + (7 * i) % 400 for i in range(61)]


def sessions_of(driver: ModelDriver, folder: Path, model: str = "m") -> Sessions:
    return Sessions(driver.scheduler.cache, SessionFiles(folder, driver.runner.storage, model))


def asked(name: str = "a", handling: Handling | None = None):
    return submit(name, PROMPT, 8, handling, logprobs=3)


@pytest.fixture
def saved(tmp_path):
    """A folder with the session `talk`, and what a request answered before it was saved."""
    driver = ModelDriver(t_cpu(), Settings(page_size=4))
    answers = driver.run([asked()])
    answer = sessions_of(driver, tmp_path).answer(SaveSession("talk", PROMPT))
    assert answer == Answer(True, 60)
    driver.scheduler.check_idle()
    return tmp_path, answers


@pytest.mark.parametrize("page_size", [4, 8, 3])
@pytest.mark.parametrize("host_pages", [0, 30])
def test_a_restored_prefix_is_found_and_every_id_and_logprob_is_equal(saved, page_size, host_pages):
    folder, before = saved
    driver = ModelDriver(t_cpu(), Settings(page_size=page_size, host_pages=host_pages, pages=40))
    driver.run([submit("other", [90] * 50, 4)])
    answer = sessions_of(driver, folder).answer(RestoreSession("talk"))
    cached = 60 // page_size * page_size
    assert answer == Answer(True, cached)
    driver.scheduler.check_idle()
    found = driver.run([asked()])
    assert found.ends["a"].cached_tokens == cached
    assert (found.ids, found.logprobs) == (before.ids, before.logprobs)


def test_what_is_on_the_host_is_saved_too(saved, tmp_path):
    folder, _ = saved
    driver = ModelDriver(t_cpu(), Settings(page_size=4, host_pages=40, pages=20))
    driver.run([asked()])
    driver.run([submit("other", [90 + i for i in range(70)], 4)])
    assert driver.scheduler.stats().num_host_pages > 0
    sessions = sessions_of(driver, tmp_path)
    assert sessions.answer(SaveSession("again", PROMPT)) == Answer(True, 60)
    first, again = (load_file(folder / f"{name}.safetensors") for name in ("talk", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_session_belongs_to_its_tenant_and_salt(tmp_path):
    driver = ModelDriver(t_cpu(), Settings())
    sessions = sessions_of(driver, tmp_path)
    driver.run([asked("a", Handling(tenant="x", cache_salt="s"))])
    assert sessions.answer(SaveSession("talk", PROMPT)).error.startswith("nothing of the 61")
    assert sessions.answer(SaveSession("talk", PROMPT, "x", "s")) == Answer(True, 56)
    for tenant, salt in (("", ""), ("x", ""), ("y", "s"), ("s", "x")):
        assert "no session talk" in sessions.answer(RestoreSession("talk", tenant, salt)).error
    assert sessions.answer(RestoreSession("talk", "x", "s")).done
    assert not any(part == "x" for path in tmp_path.rglob("*") for part in path.parts)


def test_another_model_layout_or_version_is_refused(saved):
    folder, _ = saved
    path = folder / "talk.safetensors"
    driver = ModelDriver(t_cpu(), Settings())

    def refusal(sessions: Sessions) -> str:
        answer = sessions.answer(RestoreSession("talk"))
        assert not answer.done
        driver.scheduler.check_idle()
        return answer.error

    assert "another model: its model is m, here it is n" in refusal(
        sessions_of(driver, folder, "n")
    )
    other = ModelDriver(t_cpu(), Settings(drafter="mtp"))
    assert "laid out in another way" in refusal(sessions_of(other, folder))
    tensors = load_file(path)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(tensors, path, metadata | {"version": "minidsa session 0"})
    assert "another version: its version is minidsa session 0" in refusal(
        sessions_of(driver, folder)
    )
    save_file(tensors, path)
    assert "missing" in refusal(sessions_of(driver, folder))


@pytest.mark.parametrize(
    "damage",
    [
        {"token_ids": torch.tensor([], dtype=torch.int64)},
        {"token_ids": torch.tensor([1.5, 2.0])},
        {"token_ids": torch.full((60,), -1)},
        {"token_ids": torch.full((59,), 5)},
        {"rows.0": torch.zeros(2, 60, 3)},
        {"rows.0": None},
        {"token_ids": None},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused_and_harms_nothing(saved, damage):
    folder, before = saved
    path = folder / "talk.safetensors"
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = {name: t for name, t in (load_file(path) | damage).items() if t is not None}
    save_file(tensors, path, metadata)
    driver = ModelDriver(t_cpu(), Settings())
    answer = sessions_of(driver, folder).answer(RestoreSession("talk"))
    assert not answer.done and "talk is damaged" in answer.error
    driver.scheduler.check_idle()
    assert driver.run([asked()]).ids == before.ids


def test_changed_rows_are_noticed(saved):
    """One bit of one row: the file is as good as ever but for its digest."""
    folder, _ = saved
    path = folder / "talk.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    answer = sessions_of(ModelDriver(t_cpu(), Settings()), folder).answer(RestoreSession("talk"))
    assert not answer.done and "not what was written" in answer.error


def test_a_type_that_torch_cannot_read_is_refused(saved):
    """Half a byte an element: torch fails with a RuntimeError of its own."""
    folder, _ = saved
    path = folder / "talk.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    (first, last), shape = header["rows.0"]["data_offsets"], header["rows.0"]["shape"]
    header["rows.0"]["dtype"] = "F4"
    header["rows.0"]["shape"] = [*shape[:-1], shape[-1] * 2 * (last - first) // math.prod(shape)]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    answer = sessions_of(ModelDriver(t_cpu(), Settings()), folder).answer(RestoreSession("talk"))
    assert not answer.done and "talk is damaged" in answer.error


def test_a_cut_file_and_a_folder_that_is_gone_are_told(saved):
    folder, _ = saved
    path = folder / "talk.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    driver = ModelDriver(t_cpu(), Settings())
    sessions = sessions_of(driver, folder)
    assert "damaged" in sessions.answer(RestoreSession("talk")).error
    driver.run([asked()])
    shutil.rmtree(folder)
    folder.write_text("a file stands in the way")
    assert "could not be written" in sessions.answer(SaveSession("talk", PROMPT)).error
    driver.scheduler.check_idle()


def test_a_session_larger_than_the_pool_is_refused(saved):
    folder, _ = saved
    driver = ModelDriver(t_cpu(), Settings(pages=7))
    answer = sessions_of(driver, folder).answer(RestoreSession("talk"))
    assert answer.error == "session talk needs 8 pages; 7 are available now"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../talk", "a/b", "a\\b", "-a", "a" * 65, "ä", "a\n"]
)
def test_names_cannot_leave_the_folder(saved, name):
    folder, _ = saved
    driver = ModelDriver(t_cpu(), Settings())
    answer = sessions_of(driver, folder / "inside").answer(RestoreSession(name))
    assert "no name of a session" in answer.error
    with pytest.raises(SessionError):
        SessionFiles(folder, driver.runner.storage, "m").write("", name, [1], [1])


def test_without_a_folder_every_command_is_refused():
    sessions = Sessions(ModelDriver(t_cpu(), Settings()).scheduler.cache, None)
    assert "--session-dir" in sessions.answer(RestoreSession("talk")).error


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    same = Path(shutil.copytree(t_cpu(), tmp_path / "same"))
    assert fingerprint(same) == fingerprint(t_cpu()) != fingerprint(t_tied())
    weights = next(same.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(same) != fingerprint(t_cpu())
    config = json.loads((t_cpu() / "config.json").read_text())
    shutil.copy(t_cpu() / weights.name, weights)
    (same / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert fingerprint(same) != fingerprint(t_cpu())


async def test_the_routes_exist_with_a_folder_only_and_refuse_bad_names(tmp_path):
    async with serving() as bed:
        assert (await bed.client.post("/v1/sessions/a/save", json={})).status_code == 404
    config = with_folder(tmp_path)
    async with serving(config=config) as bed:
        saved = await bed.client.post("/v1/sessions/a/save", json={"prompt": "hi"})
        assert (saved.status_code, saved.json()) == (200, {"session": "a", "num_tokens": 5})
        question = bed.engine.seen[-1]
        assert isinstance(question, SaveSession)
        assert question.name == "a" and question.token_ids[-2:] == bed.ids("hi")
        body = {"cache_salt": "s"}
        restored = await bed.client.post("/v1/sessions/a/restore", json=body)
        assert restored.status_code == 200
        assert bed.engine.seen[-1] == RestoreSession("a", "", "s")
        refused = await bed.client.post("/v1/sessions/missing/restore", json={})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "session_refused"
        for name in ("..%2Fa", ".a", "a" * 65):
            response = await bed.client.post(f"/v1/sessions/{name}/restore", json={})
            assert response.status_code in (400, 404), name
        response = await bed.client.post("/v1/sessions/a/save", json={})
        assert response.json()["error"]["param"] == "prompt"
        document = json.loads((await bed.client.get("/openapi.json")).content)
        assert "requestBody" in document["paths"]["/v1/sessions/{name}/save"]["post"]
        assert str(tmp_path) not in (await bed.client.get("/server_info")).text


def with_folder(folder: Path):
    config = server_config()
    cache = dataclasses.replace(config.engine.cache, session_dir=str(folder))
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, cache=cache))
