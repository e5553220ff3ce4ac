"""The slice of DeepSeek-V3.2 over HTTP: `minidsa serve` with random weights, and `minidsa bench`.

    python -m benchmarks.slice_http [--layers 5] [--output FILE]

A folder of config.json and a small tokenizer is served on a GPU with `--load-format dummy`. Closed
loops of so many requests at once then say what a step costs with HTTP, text and scheduling around
it (TPOT), and a first token (TTFT). Prompts are new words in every round, so no prefix is cached.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

from benchmarks.slice import V32
from minidsa.model.small_tokenizer import write_tokenizer
from minidsa.server.bench_command import Load, bench
from minidsa.server.http_client import ServerAddress

# Requests at once, words of a prompt (about three tokens each), rounds.
LOADS = ((1, 700, 3), (16, 700, 2), (64, 350, 2))
ANSWER = 128
# Ids that the small tokenizer makes of text, and those that the model chooses from.
WORDS, VOCABULARY = 4096, 129280
_READY = re.compile(r"ready: (http://\S+)")


def write_folder(folder: Path, layers: int) -> None:
    """What a server needs to know of the slice: its configuration and a tokenizer."""
    config = V32 | {"num_hidden_layers": layers, "max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, WORDS)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    # Every id of the model is some text, so that a first token shows as soon as it is there.
    tokenizer["model"]["vocab"] |= {f"w{i}": i for i in range(WORDS, VOCABULARY)}
    path.write_text(json.dumps(tokenizer))


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[ServerAddress, list[str], float]]:
    """The server's address, what it said at its start, and the seconds that took."""
    command = [sys.executable, "-m", "minidsa.server.cli", "serve", str(folder), "--port", "0"]
    command += ["--load-format", "dummy", "--kv-cache-dtype", "fp8", *flags]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said: list[str] = []
    try:
        for line in process.stdout or ():
            said.append(line.rstrip())
            if found := _READY.match(line):
                yield ServerAddress(found.group(1)), said, time.perf_counter() - began
                return
        raise SystemExit("the server ended before it was ready: " + "\n".join(said))
    finally:
        process.terminate()
        process.wait(timeout=60)


def measure(layers: int) -> dict:
    """The start's lines and the report of each load."""
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), layers)
        with served(Path(name)) as (address, said, seconds):
            print("\n".join(said), flush=True)
            loads = []
            for at_once, words, rounds in LOADS:
                load = Load(at_once * rounds, at_once, None, words, ANSWER)
                bench(address, load, lambda _: None)  # compiles kernels and captures graphs
                report = bench(address, replace(load, seed=1), lambda s: print(s, flush=True))
                loads.append({k: v for k, v in report.items() if k != "quantiles_milliseconds"})
    return {"start_seconds": round(seconds, 1), "said": said, "loads": loads}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    report = {"date": date.today().isoformat(), "layers": args.layers} | measure(args.layers)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
