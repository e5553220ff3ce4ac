"""Starting, refusing to start, draining, dying: each with a server of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import COMMAND, MODELLESS, PYTHONPATH, SMALL, ServerProcess

from patience import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture
def start(checkpoint):
    """Starts servers and ends those that a test leaves behind."""
    started: list[ServerProcess] = []

    def make(*arguments: str, **options: Any) -> ServerProcess:
        process = ServerProcess(str(checkpoint), *SMALL, *arguments, **options)
        started.append(process)
        return process

    yield make
    for process in started:
        process.kill()


class Stream(threading.Thread):
    """A streamed completion read in the background; `events` once it has ended."""

    def __init__(self, url: str, **fields: object) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 100} | fields
        self.begun = threading.Event()
        self.text = ""
        self.start()
        assert self.begun.wait(PATIENCE)

    def run(self) -> None:
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=self._body, timeout=PATIENCE
        ) as response:
            for text in response.iter_text():
                self.text += text
                self.begun.set()

    @property
    def events(self) -> list[dict]:
        self.join(PATIENCE)
        lines = [line for line in self.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


def refuse(
    *arguments: str, port: str = "0", command: Sequence[str] = COMMAND
) -> tuple[int, list[str]]:
    done = subprocess.run(
        [*command, "serve", "--port", port, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        timeout=2 * PATIENCE,
    )
    return done.returncode, [line for line in done.stderr.splitlines() if line]


def wait_draining(server: ServerProcess) -> None:
    """Wait until a signal is obeyed: readiness goes, the streams that are open go on."""
    end = time.monotonic() + PATIENCE
    while httpx.get(f"{server.url}/health").status_code == 200:
        assert time.monotonic() < end, "the signal was not obeyed"


def test_ops_07_sigterm_lets_streams_finish(start):
    server = start(command=MODELLESS)
    streams = [Stream(server.url, max_tokens=tokens) for tokens in (100, 150, 200)]
    server.process.send_signal(signal.SIGTERM)
    wait_draining(server)
    assert httpx.get(f"{server.url}/live").status_code == 200
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    for stream in streams:
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0
    assert server.said("shutting down: 3 requests in flight")
    assert server.said("finished: every request was answered")
    assert not [line for line in server.errors if not line.startswith("INFO: ")]


def test_a_signal_beside_the_import_of_what_serves_ends_the_start(start):
    server = start(wait_ready=False)
    end = time.monotonic() + PATIENCE
    while not (engines := server.engine_pids()):
        assert time.monotonic() < end and server.process.poll() is None
        time.sleep(0.005)
    assert server.stop() == 1
    assert server.lines == ["stopped before the model was loaded"]
    assert not server.errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines)


def test_ops_09_the_drain_has_a_cap(start):
    server = start("--drain-seconds", "0.3", command=MODELLESS)
    streams = [Stream(server.url, max_tokens=500) for _ in range(12)]
    begin = time.monotonic()
    assert server.stop() == 1
    assert server.said("shutting down: 12 requests in flight, up to 0.3 s")
    assert server.said("finished: ").endswith(" cut")
    assert time.monotonic() - begin < PATIENCE
    ends = {stream.events[-1]["choices"][0]["finish_reason"] for stream in streams}
    assert ends <= {"abort", "length"} and "abort" in ends


def test_a_second_signal_leaves_at_once(start):
    server = start(command=MODELLESS)
    for _ in range(12):
        Stream(server.url, max_tokens=500)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    wait_draining(server)
    assert server.stop() == 1
    assert time.monotonic() - begin < PATIENCE


def test_ops_02_the_engine_is_killed(start):
    server = start(command=MODELLESS)
    streams = [Stream(server.url, max_tokens=500) for _ in range(8)]
    os.kill(server.engine_pid, signal.SIGKILL)
    begin = time.monotonic()
    for stream in streams:
        assert stream.events[-1]["error"]["code"] == "service_unavailable"
    assert time.monotonic() - begin < PATIENCE
    assert server.wait() == 1
    assert any("engine" in line for line in server.errors)


def test_ops_03_the_server_is_killed(start):
    server = start(command=MODELLESS)
    engine = server.engine_pid
    server.process.kill()
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{engine}").exists():
        assert time.monotonic() < end, "the engine outlived its server"
        time.sleep(0.05)


def test_ops_01_a_start_tells_what_runs_and_ops_08_an_idle_server_leaves_at_once(start):
    server = start("--api-key", "secret")
    assert httpx.get(f"{server.url}/live").status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
    text = "\n".join(server.lines)
    assert "loaded random: deepseek_v32" in text
    assert "longest request: 512 tokens" in text
    assert "cache: " in text
    assert sum(line.startswith("ready: ") for line in server.lines) == 1
    assert "/v1/chat/completions" in server.lines[-1]
    stages = r"started in [\d.]+ s: checks [\d.]+ s, weights and cache [\d.]+ s, warm-up [\d.]+ s"
    assert re.fullmatch(stages, server.lines[-2])
    assert listening_sockets(server) == {f"0100007F:{int(server.url.rpartition(':')[2]):04X}"}
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    engine = server.engine_pid
    begin = time.monotonic()
    assert server.stop(signal.SIGINT) == 0
    assert time.monotonic() - begin < PATIENCE
    assert not [line for line in server.errors if not line.startswith("INFO: ")]
    assert not Path(f"/proc/{engine}").exists()


def listening_sockets(server: ServerProcess) -> set[str]:
    """ABU-20: addresses in hexadecimal that either process listens on."""
    inodes = set()
    for pid in (server.process.pid, server.engine_pid):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_ops_16_a_taken_port_is_one_line(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, lines = refuse(str(checkpoint), port=port, command=MODELLESS)
    assert code == 1
    assert len(lines) == 1 and port in lines[0] and "in use" in lines[0]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        # Refused by the server itself, then by the engine.
        ("engine.num_threads=99999999", ["num_threads", "1024"]),
        ("engine.attention_backend=flash", ["flash", "there are: auto"]),
        pytest.param(
            *("engine.max_model_len=999999", ["max_model_len is 999999", "context is 4096"]),
            marks=pytest.mark.deep,
        ),
        pytest.param(
            *("engine.cache.num_pages=999999999999", ["num_pages", "TiB", "would fit"]),
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_setting_that_cannot_be_obeyed_is_one_line_and_code_2(checkpoint, setting, words):
    code, lines = refuse(str(checkpoint), "--set", setting)
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("minidsa: ")
    assert all(word in lines[0] for word in words)


def test_http_02_a_chat_format_that_cannot_work_is_refused_before_weights_are_read(checkpoint):
    code, lines = refuse(str(checkpoint), "--chat-format", "jinja", command=MODELLESS)
    assert code == 2
    assert lines == ["minidsa: chat_format jinja: the checkpoint has no chat template"]


@pytest.mark.parametrize(
    "damage",
    [
        # Refused by the server itself, then by the engine.
        "no tokenizer",
        "short file",
        pytest.param("no weights", marks=pytest.mark.deep),
        pytest.param("broken config", marks=pytest.mark.deep),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(checkpoint, tmp_path, damage):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = sorted(tmp_path.glob("*.safetensors"))[0]
    if damage == "no tokenizer":
        (tmp_path / "tokenizer.json").unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "broken config":
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text('{"model_type": "other"}')
    else:
        content = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(content[: len(content) // 2])
    code, lines = refuse(str(tmp_path))
    assert code == 1
    assert len(lines) == 1 and lines[0].startswith("minidsa: ")
