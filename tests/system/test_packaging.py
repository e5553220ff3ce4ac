"""What is built and installed: every sub-package travels in the wheel, imports resolve one way."""

import ast
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("attention", "configs", "kv_cache", "model", "scheduler", "server")
# What pip calls, without pip, which takes as long as the rest.
BUILD_WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_pyproject_names_every_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "minidsa." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in sources()
        if path.name == "__init__.py"
    }
    assert set(declared["packages"]) == found | {"minidsa.checkpoints"}
    assert set(declared["package-dir"]) == {f"minidsa.{p}" for p in (*PACKAGES, "checkpoints")}


@pytest.mark.slow
def test_wheel_holds_every_module(tmp_path):
    # From a copy: setuptools leaves a build folder beside the sources.
    source = tmp_path / "source"
    source.mkdir()
    for folder in (*PACKAGES, "checkpoints"):
        shutil.copytree(ROOT / folder, source / folder)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-c", BUILD_WHEEL, str(tmp_path)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("minidsa-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"minidsa/{path.relative_to(ROOT)}" for path in sources()} <= names
    checkpoint = ROOT / "checkpoints" / "tiny-dsa"
    assert {f"minidsa/{path.relative_to(ROOT)}" for path in checkpoint.iterdir()} <= names


def test_imports_of_the_project_are_relative():
    """An absolute `import attention` would load a second copy of minidsa.attention."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {*PACKAGES, "minidsa"}, path


def test_the_last_output_of_make_bench_is_the_one_that_was_asked_for():
    make = ["make", "-n", "--no-print-directory", "-C", str(ROOT), "bench"]
    done = subprocess.run(
        [*make, "ARGS=--output other.json"], check=True, capture_output=True, text=True
    )
    words = shlex.split(done.stdout[done.stdout.index("-m benchmarks.cpu_serving") :])
    assert words[-2:] == ["--output", "other.json"]
