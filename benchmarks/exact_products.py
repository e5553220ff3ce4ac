"""What it costs a CPU step that a request's bits do not depend on what runs beside it.

The same steps of a checkpoint with its weights packed for `model.layers.products`, as they are
served, and with torch's default products instead, by turns; processor time of one thread:

    python -m benchmarks.exact_products checkpoints/tiny-dsa \
        --output benchmarks/results/exact_products.json
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from minidsa.attention.registry import choose
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model.checkpoint import read_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.inputs import Span, attention_batch
from minidsa.model.loader import load_model

PAGE = 64
CONTEXT = 512  # tokens before a decode
# Name: how many requests, and new tokens of each.
STEPS = {
    "decode, 1 request": (1, 1),
    "decode, 8 requests": (8, 1),
    "decode, 32 requests": (32, 1),
    "prompt of 256 tokens": (1, 256),
}
TURNS = 40


def step_of(model: DeepseekModel, requests: int, tokens: int) -> Callable[[], None]:
    """One step over a cache that is full of zeros."""
    context, num_pages = (CONTEXT if tokens == 1 else 0), -(-(CONTEXT + tokens) // PAGE)
    layout = model.config.cache_layout(with_mtp=False, is_fp8=False)
    storage = CacheStorage(layout, requests * num_pages + 1, PAGE, model.dtype, model.device)
    for plane in storage.planes():
        plane.zero_()
    indexer = model.config.indexer
    choice = choose(
        "torch",
        device_type="cpu",
        dtype=model.dtype,
        page_size=PAGE,
        has_indexer=indexer is not None,
    )
    backend = choice.build(storage, indexer.topk if indexer else None)
    spans = [
        Span(context, tokens, list(range(1 + i * num_pages, 1 + (i + 1) * num_pages)))
        for i in range(requests)
    ]
    batch = attention_batch(spans, int(tokens > 1), PAGE, model.device)
    ids_T = torch.arange(requests * tokens) % 200 + 80

    @torch.inference_mode()
    def step() -> None:
        hidden_TD = model.forward(ids_T, backend.plan(batch), backend, storage)
        model.logits(hidden_TD[-requests:])

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = read_config(arguments.checkpoint)
    models = {
        name: load_model(arguments.checkpoint, config, torch.float32, torch.device("cpu"))
        for name in ("exact", "default")
    }
    models["exact"].pack()
    found = {}
    for name, (requests, tokens) in STEPS.items():
        steps = {kind: step_of(model, requests, tokens) for kind, model in models.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in steps}
        for _ in range(TURNS):
            for kind, step in steps.items():
                start = time.process_time()
                step()
                seconds[kind].append(time.process_time() - start)
        median = {kind: 1e3 * statistics.median(times[2:]) for kind, times in seconds.items()}
        found[name] = {f"{kind}_ms": round(ms, 3) for kind, ms in median.items()}
        found[name]["ratio"] = round(median["exact"] / median["default"], 3)
        print(name, found[name], flush=True)
    if arguments.output:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        result = {"cpu": platform.processor() or platform.machine(), **versions, "steps": found}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
