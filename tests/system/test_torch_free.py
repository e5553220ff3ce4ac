"""The API process never imports torch: text work stays light, and the engine alone owns devices."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["minidsa.server.app", "minidsa.server.cli"])
def test_api_process_leaves_torch_out(module):
    code = f"import sys, {module}; print(*({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
