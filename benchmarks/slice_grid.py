"""Decode steps of the slice of DeepSeek-V3.2 by batch and context, sparse beside dense, and mixed.

    python -m benchmarks.slice_grid [--layers 5] [--output FILE]

The model and the requests are those of `benchmarks/slice.py`, rows in fp8. Every step is timed with
the model's own attention (dense up to 2048 tokens, the 2048 best keys above) and with dense
attention over the same rows, both replayed as graphs: where the second gets slower, sparse
attention begins to win. A mixed step computes a chunk of a prompt beside 64 decodes, which is how
long those wait for their next token.
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import triton

from benchmarks.slice import PAGE, Slice, new_model
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.configs.sampling import AttentionRule
from minidsa.model.decode_graphs import DecodeGraphs
from minidsa.model.runner import ModelRunner

BATCHES = (1, 4, 16, 64, 128, 256)
CONTEXTS = (2048, 4096, 8192, 32768, 65536, 131072)
# Rows of all requests of a step, as many as fit beside the weights.
MOST_TOKENS = 256 * 32768
CHUNKS = (256, 1024, 4096)
MIXED = (64, 8192)
STEPS = 6


def dense_runner(work: Slice) -> ModelRunner:
    """The same model over the same rows, attending to all of them."""
    if not isinstance(work.backend, DsaBackend):
        raise TypeError(f"{work.backend.name} has no dense attention beside the sparse one")
    backend = work.backend.under(AttentionRule("dense"))
    graphs = DecodeGraphs(work.model, backend, work.storage, work.capture)
    return ModelRunner(work.model, backend, work.storage, graphs)


def measure(layers: int, save: Callable[[dict], None]) -> None:
    work = Slice(new_model(layers), MOST_TOKENS + BATCHES[-1] * PAGE, "fp8")
    dense = dense_runner(work)
    done = 0
    for length in CONTEXTS:
        work.prompt(length - done, done)
        done = length
        batches = [b for b in BATCHES if b * length <= MOST_TOKENS]
        pages = work.spread(batches[-1], length)
        for requests in batches:
            row: dict = {"requests": requests, "context": length}
            for name, runner in (("ms", work.replaying), ("dense_ms", dense)):
                taken, replay = work.step_ms(runner, pages[:requests], length, STEPS)
                row[name], row[name.replace("ms", "replay_ms")] = round(taken, 3), round(replay, 3)
            save(row)
        if length == MIXED[1]:
            for chunk in CHUNKS:
                ms = work.mixed_ms(pages[: MIXED[0]], length, chunk, STEPS)
                save({"requests": MIXED[0], "context": length, "chunk": chunk, "ms": round(ms, 3)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    report = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "layers": args.layers,
        "figures": [],
    }

    def save(row: dict) -> None:
        print(json.dumps(row), flush=True)
        report["figures"].append(row)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    with torch.inference_mode():
        measure(args.layers, save)


if __name__ == "__main__":
    main()
