"""SGLang's bench client, by chat and by completions; no request may fail.

The client's own modules run unchanged. The packages around them load the engine, so those are
entered without running what they do on import.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import runpy
import sys
import tempfile
import types
from importlib.machinery import PathFinder
from pathlib import Path

COUNT = 4
url, checkpoint = sys.argv[1:3]


def enter(name: str) -> None:
    """Make a package's modules importable without running its own code."""
    parent = name.rpartition(".")[0]
    spec = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
    assert spec is not None and spec.submodule_search_locations is not None, name
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)


for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
    enter(name)
# Of the engine's module the client reads this one constant, for a mode that is not run here.
constants = types.ModuleType("sglang.srt.disaggregation.utils")
constants.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
sys.modules[constants.__name__] = constants

for backend in ("vllm-chat", "vllm"):
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.jsonl")
        sys.argv = ["serving", "--backend", backend, "--base-url", url, "--model", "tiny-dsa"]
        sys.argv += ["--tokenizer", checkpoint, "--dataset-name", "random-ids"]
        sys.argv += ["--random-input-len", "32", "--random-output-len", "8"]
        sys.argv += ["--num-prompts", str(COUNT), "--output-file", str(result)]
        runpy.run_module("sglang.benchmark.serving", run_name="__main__")
        found = json.loads(result.read_text())
    assert found["completed"] == COUNT, (backend, found["completed"])
