"""vLLM's bench client, without its engine, by completions and by chat; no request may fail."""

# pyright: reportMissingImports=false

import argparse
import json
import sys
import tempfile
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main

COUNT = 8
url, checkpoint = sys.argv[1:3]
for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = ["--backend", backend, "--endpoint", path, "--base-url", url]
        options += ["--model", "tiny-dsa", "--tokenizer", checkpoint, "--dataset-name", "random"]
        options += ["--random-input-len", "32", "--random-output-len", "8"]
        options += ["--num-prompts", str(COUNT), "--save-result", "--result-filename", str(result)]
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(options))
        found = json.loads(result.read_text())
    assert (found["completed"], found["failed"]) == (COUNT, 0), (backend, found["errors"])
