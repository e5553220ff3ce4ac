"""One thread for every test (two that share busy cores are many times slower), shared fixtures.

Without a GPU, kernels run in Triton's interpreter.
"""

import gc
import logging
import os
import shutil
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests.

    The one that hands them out to pytest-xdist's workers starts these before long: it imports
    nothing of what they need.
    """
    if config.getoption("numprocesses", None) is None or hasattr(config, "workerinput"):
        _prepare()


def pytest_collection_finish() -> None:
    """From here on there is garbage, which is looked for less often than usual.

    What was imported stays. FastAPI keeps what it knows of thousands of routes, so that each search
    took half a second, all of them a quarter of the time of tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def _prepare() -> None:
    gc.disable()
    # Read when torch is loaded. Threads that wait give up their core, which other tests keep busy:
    # spinning, they made what uses two of them five times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import hypothesis
    import torch

    torch.set_num_threads(1)
    # Six times a test, pytest would hang a handler on each of torch's fifty that do not.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    # A slow machine is no finding.
    hypothesis.settings.register_profile("patient", deadline=None, max_examples=30)
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
    hypothesis.settings.register_profile(
        "unshrunk",
        hypothesis.settings.get_profile("patient"),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("patient")
    if not torch.cuda.is_available():
        # Read by triton when a kernel is defined, so before any is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from interpreter import quicken

        quicken()


@pytest.fixture
def single(tmp_path):
    """A private copy of T_CPU in one file."""
    from checkpoints import t_four_layers

    return Path(shutil.copytree(t_four_layers(), tmp_path / "single"))


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """T_CPU in several files and an index."""
    from checkpoints import T_CPU, tensors_of
    from minidsa.model import make_checkpoint

    monkeypatch.setattr(make_checkpoint, "SHARD_BYTES", 400_000)
    make_checkpoint.write_checkpoint(tmp_path / "sharded", dict(T_CPU), tensors_of(T_CPU))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    return tmp_path / "sharded"
