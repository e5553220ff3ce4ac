"""The engine process: how it starts, serves, refuses and leaves, and every way that it can die."""

import asyncio
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from minidsa.configs.engine import EngineConfig
from minidsa.configs.setting_error import SettingError
from minidsa.scheduler.messages import Abort, Failed, Heartbeat, Loaded, Outputs, Planned, Ready
from minidsa.scheduler.process import EngineDied, EngineProcess, make_checkpoint
from patience import PATIENCE
from scheduler_fakes import FakeTarget, Plan, expected, submit

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(hang_timeout=30.0)


async def until_ready(engine):
    assert isinstance(await engine.recv(), Planned)
    loaded = await engine.recv()
    assert isinstance(loaded, Loaded), loaded
    assert isinstance(await engine.recv(), Ready)
    return loaded.info


async def outputs_of(engine, request_id):
    """Outputs of one request up to its last."""
    while True:
        event = await engine.recv()
        if isinstance(event, Outputs):
            for output in event.outputs:
                if output.request_id == request_id:
                    yield output
                    if output.finish_reason:
                        return


async def generate(engine, command):
    engine.send(command)
    return [token async for o in outputs_of(engine, command.request_id) for token in o.token_ids]


async def to_its_end(engine):
    """Everything the engine says until it has died, and what is said about its death."""
    events = []
    try:
        async with asyncio.timeout(60):
            while True:
                events.append(await engine.recv())
    except EngineDied as error:
        return events, error
    finally:
        engine.close()


async def all_events(engine):
    events, death = await to_its_end(engine)
    return events, death.exitcode


def is_gone(pid):
    """No such process, or only its exit status is left of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_healthy_engine():
    engine = EngineProcess.start(CONFIG, FakeTarget())
    directory = engine._directory
    try:
        info = await until_ready(engine)
        assert info.vocab_size == 512 and engine.is_alive and engine.exitcode is None
        assert directory.stat().st_mode & 0o777 == 0o700  # ABU-20: for this user alone
        assert await generate(engine, submit("a", [1, 2, 3], 8)) == expected([1, 2, 3], 8)

        # Ctrl-C and supervisors signal the whole group: the engine leaves that to its parent.
        assert engine.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.pid, number)
        assert await generate(engine, submit("b", [4], 20)) == expected([4], 20)

        engine.send(submit("c", [5], 100))
        engine.send(Abort("c"))
        assert [o.finish_reason async for o in outputs_of(engine, "c")][-1] == "abort"
        while not isinstance(event := await engine.recv(), Heartbeat):
            pass
        start = time.monotonic()
        assert isinstance(await engine.recv(), Heartbeat)
        assert time.monotonic() - start < PATIENCE
        assert event.stats.num_free_pages == event.stats.num_pages == 64
        assert event.stats.num_prompt_tokens <= 3 + 1 + 1  # the warm-up is not counted
    finally:
        assert await engine.stop() == 0
    assert not directory.exists()
    assert not engine.is_alive
    engine.send(Abort("late"))
    engine.close()


async def test_ops_02_kill_the_engine_with_open_streams():
    engine = EngineProcess.start(CONFIG, FakeTarget(Plan(delay=0.01)))
    await until_ready(engine)
    for i in range(20):
        engine.send(submit(f"r{i}", [i], 100))
    while not isinstance(await engine.recv(), Outputs):
        pass
    assert engine.pid is not None
    start = time.monotonic()
    os.kill(engine.pid, signal.SIGKILL)
    _, code = await all_events(engine)
    assert code == -signal.SIGKILL and time.monotonic() - start < PATIENCE
    assert await engine.stop() == -signal.SIGKILL


async def test_ops_05_a_hang_ends_the_process_with_all_stacks_and_slow_steps_do_not(capfd):
    target = FakeTarget(Plan(delay=0.4, hang_step=6))
    engine = EngineProcess.start(EngineConfig(hang_timeout=2.0), target)
    await until_ready(engine)
    assert await generate(engine, submit("slow", [1], 2)) == expected([1], 2)
    await asyncio.sleep(2.2)  # idle for longer than the timeout
    engine.send(submit("a", [1], 100))
    start = time.monotonic()
    events, code = await all_events(engine)
    assert 2.0 < time.monotonic() - start < PATIENCE
    assert code == -signal.SIGALRM
    assert sum(bool(e.outputs) for e in events if isinstance(e, Outputs)) == 1
    stacks = capfd.readouterr().err
    assert "_misbehave" in stacks and "scheduler/engine.py" in stacks
    assert "scheduler/worker.py" in stacks  # the thread that follows the parent


@pytest.mark.parametrize(
    ("target", "setting", "doing"),
    [
        (FakeTarget(tensors=1, tensor_seconds=3600), "load_timeout", "loading"),
        (FakeTarget(Plan(hang_step=1)), "warm_up_timeout", "warming up"),
        (FakeTarget(Plan(hang_step=2)), "warm_up_timeout", "warming up"),
        (FakeTarget(Plan(hang_step=3)), "hang_timeout", "computing a step"),
    ],
)
async def test_ops_05_each_stage_has_its_limit_and_its_name(capfd, target, setting, doing):
    config = dataclasses.replace(EngineConfig(), **{setting: 0.5})
    engine = EngineProcess.start(config, target)
    engine.send(submit("a", [1], 4))
    start = time.monotonic()
    _, death = await to_its_end(engine)
    assert time.monotonic() - start < PATIENCE
    assert death.exitcode == -signal.SIGALRM
    assert str(death) == (
        f"the engine hung while it was {doing}: no progress within engine.{setting} = 0.5 "
        "seconds; the stacks of its threads are above"
    )
    assert "scheduler_fakes.py" in capfd.readouterr().err


async def test_a_load_may_take_long_as_long_as_it_goes_on():
    """The limit is for one tensor, not for all of them together."""
    target = FakeTarget(tensors=9, tensor_seconds=0.5)
    engine = EngineProcess.start(EngineConfig(load_timeout=4.0), target)
    try:
        await until_ready(engine)
    finally:
        engine.close()


async def test_a_setting_that_is_refused_is_told_from_a_bad_checkpoint():
    for error, is_setting in ((SettingError("no"), True), (ValueError("no"), False)):
        engine = EngineProcess.start(CONFIG, FakeTarget(refuse=error))
        assert await all_events(engine) == ([Failed("no", is_setting)], 1)


async def test_what_cannot_be_served_is_one_line_and_what_is_a_bug_has_its_traceback(capfd):
    targets = (
        FakeTarget(refuse=ValueError("bad checkpoint:\n no such tensor")),
        FakeTarget(Plan(fail_steps=frozenset({2}))),
        FakeTarget(Plan(fail_forever_from=5)),
    )
    engines = [EngineProcess.start(CONFIG, target) for target in targets]
    refused, cold = [await all_events(engine) for engine in engines[:2]]
    await until_ready(engines[2])
    assert await generate(engines[2], submit("a", [1], 2)) == expected([1], 2)
    engines[2].send(submit("b", [1], 2))
    broken = await all_events(engines[2])
    assert refused == ([Failed("bad checkpoint: no such tensor")], 1)
    assert [type(event) for event in cold[0]] == [Planned, Loaded, Failed]
    assert cold[0][-1] == Failed("RuntimeError: planned failure of step 2") and cold[1] == 1
    assert broken[0][-1] == Failed(
        "a step failed, and so did a probe of one token, with "
        "RuntimeError('planned failure of step 6')"
    )
    assert broken[1] == 1
    errors = capfd.readouterr().err
    assert "no such tensor" not in errors
    for step in (2, 5, 6):
        assert f"RuntimeError: planned failure of step {step}" in errors


PARENT = """
    import asyncio
    from minidsa.configs.engine import EngineConfig
    from minidsa.scheduler.process import EngineProcess
    from scheduler_fakes import FakeTarget, Plan, submit

    async def main():
        target = FakeTarget(Plan(delay=0.05))
        idle, busy = [EngineProcess.start(EngineConfig(), target) for _ in range(2)]
        for engine in (idle, busy):
            for _ in ("planned", "loaded", "ready"):
                await engine.recv()
        busy.send(submit("a", [1], 100))
        await busy.recv()
        print(idle.pid, idle._directory, busy.pid, busy._directory, flush=True)
        while True:
            await idle.recv()

    if __name__ == "__main__":
        asyncio.run(main())
"""
LEAVING = """
    from minidsa.configs.engine import EngineConfig
    from minidsa.scheduler.process import EngineProcess

    if __name__ == "__main__":
        engine = EngineProcess.start(EngineConfig())
        print(engine.pid, engine._directory, flush=True)
"""


@pytest.mark.parametrize(
    ("source", "code"), [(PARENT, -signal.SIGKILL), (LEAVING, 0)], ids=["killed", "leaves"]
)
def test_ops_03_engines_go_with_their_parent(tmp_path, source, code):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(source))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        words = parent.stdout.readline().split()
        if code:
            assert not any(is_gone(pid) for pid in words[::2])
            parent.kill()
        assert parent.wait(timeout=PATIENCE) == code
    deadline = time.monotonic() + PATIENCE
    while not all(map(is_gone, words[::2])) or any(Path(d).exists() for d in words[1::2]):
        assert time.monotonic() < deadline, "an engine outlived its parent"
        time.sleep(0.02)


async def test_close_ends_an_engine_that_is_still_loading():
    engine = EngineProcess.start(CONFIG, FakeTarget())
    waiting = asyncio.create_task(engine.recv())
    await asyncio.sleep(0)
    waiting.cancel()
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < PATIENCE
    assert engine.exitcode == -signal.SIGKILL and not engine._directory.exists()
    assert multiprocessing.active_children() == []


def test_checkpoints_are_written_by_a_child_so_that_torch_stays_out(tmp_path):
    code = (
        "import sys; from minidsa.server.commands import run\n"
        "if __name__ == '__main__':\n    print(run(['make-checkpoint', sys.argv[1]]))\n"
        "    sys.exit('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "new")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("wrote a random checkpoint to") and not done.stderr
    assert (tmp_path / "new" / "config.json").exists()
    assert list((tmp_path / "new").glob("*.safetensors"))


def test_a_checkpoint_that_its_child_cannot_write_is_told(tmp_path, monkeypatch, capfd):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="no checkpoint was written to"):
        make_checkpoint(str(tmp_path / "new"), 0)
    assert "ImportError: no torch here" in capfd.readouterr().err
