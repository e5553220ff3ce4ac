"""One random checkpoint and one server for all end-to-end tests that do not stop it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import SMALL, ServerProcess

from minidsa.model.make_checkpoint import PRESETS, write_random_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as `minidsa make-checkpoint` writes it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "random"
    write_random_checkpoint(folder, PRESETS["default"], seed=3)
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
