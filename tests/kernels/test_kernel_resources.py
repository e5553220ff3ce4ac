"""The kernels as the compiler makes them for Hopper, which takes no GPU: what must not slip."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_OF_A_PROCESSOR = 232_448
# A few registers are put aside, how many depends on the compiler's version; spilt tiles take more.
STACK = 32


@pytest.mark.deep
def test_kernels_fit_a_hopper_gpu(tmp_path):
    """Registers are not spilled, tiles fit, and big blocks use the instructions for warp groups."""
    report = tmp_path / "resources.json"
    command = [sys.executable, "-m", "benchmarks.kernel_resources", "--output", str(report)]
    # Compiled kernels of other settings must not stand in for these.
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 28
    for row in rows:
        assert row["stack"] <= STACK, row
        assert row["shared"] <= SHARED_OF_A_PROCESSOR, row
        assert row["LDGSTS"], row
        assert row["HGMMA"] if "128 heads" in row["shape"] else True, row
