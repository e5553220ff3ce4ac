"""The engine process and its channel: start, stop, every way to die, and garbage frames."""

from minidsa.configs.engine import EngineConfig
from minidsa.scheduler.messages import Loaded, Outputs, Ready
from minidsa.scheduler.process import EngineProcess
from scheduler_fakes import FakeTarget, expected, submit


async def until_ready(engine):
    loaded = await engine.recv()
    assert isinstance(loaded, Loaded)
    assert isinstance(await engine.recv(), Ready)
    return loaded.info


async def generate(engine, command):
    engine.send(command)
    ids = []
    while True:
        event = await engine.recv()
        if not isinstance(event, Outputs):
            continue
        for output in event.outputs:
            if output.request_id == command.request_id:
                ids += output.token_ids
                if output.finish_reason:
                    return ids, output


async def test_start_generate_stop():
    engine = EngineProcess.start(EngineConfig(), FakeTarget())
    try:
        info = await until_ready(engine)
        assert info.vocab_size == 512
        ids, last = await generate(engine, submit("a", [1, 2, 3], 8))
        assert ids == expected([1, 2, 3], 8) and last.finish_reason == "length"
    finally:
        assert await engine.stop() == 0
