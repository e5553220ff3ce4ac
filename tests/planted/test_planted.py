"""The tests of scheduler and cache notice each of twenty planted bugs.

Every bug is planted in a copy of the sources, on which these tests then run until one fails.
Without a bug they pass on such a copy, so it is the bug that they notice. `make planted` runs this;
that the bugs still fit the sources is asked in every run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
SUITE = (
    "test_pool.py",
    "test_prefix_cache.py",
    "test_scheduler.py",
    "test_policy.py",
    "test_host_tier.py",
    "test_pool_machine.py",
    "test_cache_machine.py",
    "test_scheduler_machine.py",
)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the sources, as the package `minidsa`, with their tests beside it."""
    package = tmp_path / "minidsa"
    for folder in ("attention", "configs", "kv_cache", "model", "scheduler"):
        shutil.copytree(ROOT / folder, package / folder)
    (package / "__init__.py").write_text("")
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a copy, which finds the package of the copy first."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def run_suite(tree: Path) -> subprocess.CompletedProcess[str]:
    # What is found is not made shorter: that it is found is all that is asked.
    options = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "unshrunk")
    return run(tree, "-m", "pytest", *options, *(f"tests/unit/{name}" for name in SUITE))


def plant(tree: Path, bug: Bug) -> None:
    path = tree / "minidsa" / bug.file
    text = path.read_text()
    assert text.count(bug.right) == 1, f"{bug.name} does not fit {bug.file} any more"
    path.write_text(text.replace(bug.right, bug.wrong))


@pytest.mark.deep
def test_nothing_is_noticed_where_nothing_is_planted(tree):
    done = run(tree, "-c", "import minidsa.kv_cache.cache as cache; print(cache.__file__)")
    assert done.stdout.startswith(str(tree)), "the copy is not what is tested"
    done = run_suite(tree)
    assert done.returncode == 0, done.stdout


def test_there_are_twenty_different_bugs():
    assert len(BUGS) == len({(bug.file, bug.right, bug.wrong) for bug in BUGS}) == 20


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_fits_the_sources(bug):
    assert (ROOT / bug.file).read_text().count(bug.right) == 1


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_planted_bug_is_noticed(tree, bug):
    plant(tree, bug)
    done = run_suite(tree)
    # 1: tests ran, and one failed. Anything else would be no finding.
    assert done.returncode == 1, f"{bug.what}, and nobody noticed: {done.stdout[-2000:]}"
    assert "1 failed" in done.stdout, done.stdout
