"""Kernels compile for a Hopper GPU, also where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.deep
def test_kernels_compile_for_hopper(tmp_path):
    """In a process of its own: this one may interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_only.py")],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for kernel in (
        "_attend",
        "attend_fp8",
        "_logits",
        "_select",
        "_collect",
        "_choose",
        "_write",
        "_quantise_queries",
        "_products",
    ):
        assert f"{kernel}: " in run.stdout
