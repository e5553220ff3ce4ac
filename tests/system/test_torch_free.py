"""The API process never imports torch, and the engine nothing of the server.

Text work stays light, the engine alone owns devices, and both are quick to start.
"""

import subprocess
import sys

import pytest


def imported(modules: str, unwanted: set[str]) -> str:
    code = f"import sys, {modules}; print(*({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["minidsa.server.serving", "minidsa.server.commands"])
def test_api_process_leaves_torch_out(module):
    assert imported(module, {"torch", "transformers"}) == ""


def test_the_engine_leaves_the_server_out():
    """A spawned engine imports the parent's main module as well, which is `cli`."""
    modules = "minidsa.server.cli, minidsa.scheduler.worker"
    assert imported(modules, {"fastapi", "uvicorn", "minidsa.server.commands"}) == ""
