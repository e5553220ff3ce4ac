"""A real `minidsa serve` in a process of its own, as a user starts it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from patience import PATIENCE

START_SECONDS = 2 * PATIENCE
COMMAND = (sys.executable, "-m", "minidsa.server.cli")
MODELLESS = (sys.executable, str(Path(__file__).with_name("modelless.py")))
"""The same but for the model: its engine takes a tenth of the time to start."""
PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
SMALL = (
    *("--port", "0", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "512"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "128"),
    *("--set", "engine.cache.num_pages=256"),
)


class ServerProcess:
    """Starts on construction; `url` is known once the ready line was read. `lines` is stdout."""

    def __init__(
        self, *arguments: str, wait_ready: bool = True, command: Sequence[str] = COMMAND
    ) -> None:
        self.process = subprocess.Popen(
            [*command, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "default", "PYTHONPATH": PYTHONPATH},
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read_lines, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        if wait_ready:
            self.wait_ready()

    def wait_ready(self) -> None:
        if not self._ready.wait(START_SECONDS):
            self.kill()
            raise AssertionError(f"the server did not become ready: {self.lines} {self.errors}")
        if not self.url:
            raise AssertionError(f"the server ended: {self.lines} {self.errors}")

    @property
    def engine_pid(self) -> int:
        """The child that runs the model."""
        (found,) = self.engine_pids()
        return found

    def engine_pids(self) -> list[int]:
        """None before the engine is started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [
            int(pid)
            for pid in children.split()
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def said(self, start: str) -> str:
        """The line of stdout that begins like this; empty if there is none."""
        return next((line for line in self.lines if line.startswith(start)), "")

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^minidsa:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def wait_idle(self, seconds: float = PATIENCE) -> None:
        """Wait until no request runs and every page is free."""
        end = time.monotonic() + seconds
        while self.metric("num_requests_running") or self.metric("kv_cache_usage_perc"):
            assert time.monotonic() < end, "the server did not become idle"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = PATIENCE) -> int:
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready: "):
                self.url = line.split()[1]
                self._ready.set()
        self._ready.set()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += [line.rstrip("\n") for line in self.process.stderr]
