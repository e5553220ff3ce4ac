"""One random checkpoint and one server for all end-to-end tests that do not stop it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import COMMAND, SMALL, ServerProcess


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as `minidsa make-checkpoint` writes it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "random"
    command = [*COMMAND, "make-checkpoint", str(folder), "--seed", "3"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("wrote a random checkpoint")
    return folder


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server that every test leaves running and idle."""
    process = ServerProcess(str(checkpoint), *SMALL)
    yield process
    process.kill()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The official client, unchanged but for its address."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client
    server.wait_idle()
