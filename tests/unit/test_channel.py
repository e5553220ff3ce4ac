"""The line between the processes: typed both ways, garbage dropped, no event lost."""

import asyncio
import multiprocessing
import os
import random
import shutil
import tempfile

import msgspec
import pytest
import zmq

from minidsa.configs.engine import EngineConfig
from minidsa.scheduler import messages
from minidsa.scheduler.channel import MAX_FRAME_BYTES, ApiLink, EngineLink, decode, new_directory
from minidsa.scheduler.messages import (
    Abort,
    Answer,
    FlushCache,
    Heartbeat,
    Outputs,
    RequestOutput,
    Shutdown,
)
from patience import PATIENCE
from scheduler_fakes import FakeTarget, submit

COMMANDS = [
    submit("a", [1, 2, 3], logit_bias={3: 1.5}, logprobs=2),
    Abort("a"),
    FlushCache(),
    Shutdown(),
]
INFO = messages.EngineInfo(
    "m", 9, 8, [1], 2, 3, "f", "cpu", "b", 4, 5, 6, "f", 7, 8, 9, "none", 0, ["note"]
)
EVENTS = [
    messages.Loaded(INFO),
    messages.Ready(),
    Answer(False, 3, "why"),
    Heartbeat(messages.EngineStats(num_running=3)),
    Outputs(
        [
            RequestOutput("a", [7], "stop", [messages.TokenLogprobs(-0.5, 1, [7], [-0.5])]),
            RequestOutput("b", [], "error", error="x", error_kind="overloaded"),
        ],
        messages.EngineStats(),
    ),
    messages.Failed("one line"),
]


@pytest.fixture
async def ends(tmp_path):
    engine, api = EngineLink(tmp_path), ApiLink(tmp_path)
    yield engine, api
    api.close()
    engine.close()


async def heard(api, grace=1.0):
    gone = asyncio.get_running_loop().create_future()
    try:
        return await asyncio.wait_for(api.receive(gone, grace), PATIENCE)
    finally:
        gone.cancel()


async def test_every_message_arrives_as_it_was_sent(ends):
    engine, api = ends
    for command in COMMANDS:
        api.send(command)
    received = []
    while len(received) < len(COMMANDS):
        received += engine.receive(1.0)
    assert received == COMMANDS
    for event in EVENTS:
        engine.send(event)
    assert [await heard(api) for _ in EVENTS] == EVENTS


async def test_receiving_waits_no_longer_than_it_is_told(ends):
    engine, _ = ends
    assert engine.receive(0.0) == []
    assert engine.receive(0.01) == []


async def test_a_cancelled_receive_loses_nothing(ends):
    engine, api = ends
    gone = asyncio.get_running_loop().create_future()
    for event in EVENTS:
        task = asyncio.create_task(api.receive(gone, 1.0))
        await asyncio.sleep(0.01)
        task.cancel()
        engine.send(event)
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(api.receive(gone, 1.0), PATIENCE) == event
    gone.cancel()


async def test_last_words_are_heard_and_then_silence(ends):
    engine, api = ends
    gone = asyncio.get_running_loop().create_future()
    gone.set_result(None)
    engine.send(messages.Failed("why"))
    assert await api.receive(gone, 1.0) == messages.Failed("why")
    assert await api.receive(gone, 0.01) is None


def garbage(rng, honest):
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return honest[: rng.randrange(len(honest))]
    if kind == 2:
        return honest + rng.randbytes(1 + rng.randrange(5))
    if kind == 3:
        return b"\x91" * rng.randrange(1, 5000)  # arrays in arrays
    flipped = bytearray(honest)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


@pytest.mark.parametrize(
    ("schema", "known"), [(messages.Command, COMMANDS), (messages.Event, EVENTS)]
)
def test_abu_21_only_the_closed_schema_comes_out_of_garbage(schema, known):
    rng = random.Random(21)
    decoder, encoder = msgspec.msgpack.Decoder(schema), msgspec.msgpack.Encoder()
    honest = [encoder.encode(message) for message in known]
    outcomes = [decode(decoder, garbage(rng, rng.choice(honest))) for _ in range(10_000)]
    # A flipped bit may leave a message that is well-formed; no other type ever comes out.
    assert {type(outcome) for outcome in outcomes} <= {type(m) for m in known} | {type(None)}
    assert sum(outcome is None for outcome in outcomes) > 6000


async def test_abu_21_garbage_on_the_wire_is_dropped_in_both_directions(ends, tmp_path, caplog):
    engine, api = ends
    context = zmq.Context()
    intruder = context.socket(zmq.PUSH)
    intruder.connect(f"ipc://{tmp_path}/commands")
    for frame in (b"", b"\xc1", b"\x80", b"cos\nsystem\n(S'true'\ntR.", b"\x91" * 100_000):
        intruder.send(frame)
        engine._events.send(frame)
    intruder.send_multipart([b"a", b"b"])
    api.send(COMMANDS[0])
    received = []
    while not received:
        received = engine.receive(1.0)
    assert received == [COMMANDS[0]]
    engine.send(EVENTS[1])
    assert await heard(api) == EVENTS[1]
    assert "dropped a frame of 1 bytes" in caplog.text
    assert all("\n" not in record.getMessage() for record in caplog.records)
    intruder.close(linger=0)
    context.term()


async def test_sending_to_a_dead_engine_neither_waits_nor_fails(tmp_path):
    api = ApiLink(tmp_path)
    for _ in range(1000):
        api.send(Abort("nobody"))
    api.close()


def test_a_frame_has_a_largest_size(tmp_path):
    engine = EngineLink(tmp_path)
    assert engine._commands.get(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES
    engine.close()


@pytest.mark.parametrize("length", [1, 40, 200])
def test_the_line_fits_whatever_the_folder_for_temporary_files_is_called(
    tmp_path, monkeypatch, length
):
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    directory = new_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    engine, api = EngineLink(directory), ApiLink(directory)
    api.send(Abort("a"))
    assert engine.receive(PATIENCE) == [Abort("a")]
    api.close()
    engine.close()
    shutil.rmtree(directory)
    assert not os.listdir(folder)


def test_an_engine_whose_directory_is_gone_ends_without_a_word(tmp_path, capfd):
    """The parent was killed while the engine was importing."""
    arguments = (str(tmp_path / "gone"), EngineConfig())
    process = multiprocessing.get_context("spawn").Process(target=FakeTarget(), args=arguments)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 1
    assert capfd.readouterr() == ("", "")
