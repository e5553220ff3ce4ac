"""Decode steps and prompts of a slice of DeepSeek-V3.2 at full width on one GPU, without HTTP.

    python -m benchmarks.slice [--layers 5] [--rows fp8] [--profile] [--output FILE]

One dense layer and as many of experts as asked for, all 256 of them, with random fp8 weights made
on the device, so that routing is spread. A step is what the server computes: `ModelRunner.run` with
greedy sampling, from host lists to host tokens. Steps are replayed as CUDA graphs; "ms" is the time
from one to the next where each is started before the tokens in front of it are waited for, as the
server does, "alone_ms" that of a step which is waited for. Where `--eager` says so they are
launched one operation after the other, too; `--profile` adds where the time of a step goes
(`step_split.py`). Each context holds rows of its own: one prompt is computed, and its rows are
copied to the pages of the other requests.

A step that verifies drafts is timed beside a plain one, both waited for; "gain" is what it brings
by the chance that a draft is accepted: tokens a step over what the longer step costs. The routing
of random tokens has nothing in common, so that drafts read experts of their own.

The floor of a step is the bytes it must read: weights of the experts that are hit, and cached rows.
"""

import argparse
import json
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import triton

from benchmarks.kernel_cases import BYTES_PER_US
from benchmarks.step_split import Split, split, trace
from minidsa.attention.registry import choose
from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model.captured_step import Replayed, Run
from minidsa.model.choosing import Choosing
from minidsa.model.config import parse_config
from minidsa.model.decode_graphs import CudaCapture, DecodeGraphs
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.dummy_weights import random_model
from minidsa.model.layer_graphs import LayerGraphs
from minidsa.model.replayed_step import ReplayedStep
from minidsa.model.runner import ModelRunner
from minidsa.model.sequence import SampleInput, SequenceInput
from minidsa.model.step_memory import LARGEST_CHUNK

DEVICE = torch.device("cuda")
PAGE = 64
CHUNK = 8192
# What is not named has DeepSeek-V3.2's own value (`model/config_defaults.py`).
V32 = {
    "model_type": "deepseek_v32",
    "first_k_dense_replace": 1,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
GREEDY = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
VERIFIES = [(1, 2048, 3), (8, 2048, 3)]
DECODES = [(1, 2048), (1, 30720), (16, 8192), (64, 4096), (64, 16384), (64, 32768)]


class TimedCapture:
    """Captures graphs whose replays are timed on the device."""

    def __init__(self) -> None:
        self._capture = CudaCapture()
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run: Run) -> Run:
        replay = self._capture(run)

        def timed() -> None:
            self.start.record()
            replay()
            self.stop.record()

        return timed


def new_model(layers: int) -> DeepseekModel:
    """The slice with so many layers."""
    config = parse_config(V32 | {"num_hidden_layers": layers})
    return random_model(config, torch.bfloat16, DEVICE, keeps_fp8=True)


class Slice:
    """A model, a cache for so many tokens, and requests of one length."""

    def __init__(self, model: DeepseekModel, tokens: int, rows: str) -> None:
        self.model = model
        layout = model.config.cache_layout(with_mtp=False, is_fp8=rows == "fp8")
        self.storage = CacheStorage(layout, tokens // PAGE + 1, PAGE, model.dtype, DEVICE)
        choice = choose(
            "auto", device_type="cuda", dtype=model.dtype, page_size=PAGE, has_indexer=True
        )
        self.backend = choice.build(self.storage, 2048)
        self.capture = TimedCapture()
        graphs = DecodeGraphs(model, self.backend, self.storage, self.capture)
        layers = LayerGraphs(model, self.backend, self.storage, LARGEST_CHUNK, CudaCapture())
        self.replaying = ModelRunner(model, self.backend, self.storage, graphs, layers)
        self.eager = ModelRunner(model, self.backend, self.storage)
        self.vocab_size = model.config.vocab_size

    def prompt(self, length: int, start: int = 0) -> float:
        """Compute a prompt into the first pages; seconds."""
        pages = list(range(1, (start + length) // PAGE + 2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        for first in range(start, start + length, CHUNK):
            ids = torch.randint(self.vocab_size, (min(CHUNK, start + length - first),)).tolist()
            self.eager.run([SequenceInput(ids, first, pages, None)], 1)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def spread(self, requests: int, length: int) -> list[list[int]]:
        """Pages of so many requests, all filled with the rows of the first."""
        each = length // PAGE + 1
        for plane in self.storage.planes():
            rows = plane.view(-1, *plane.shape[-2:])
            first = rows[:, PAGE : PAGE * (each + 1)]
            for r in range(1, requests):
                rows[:, PAGE * (1 + r * each) : PAGE * (1 + (r + 1) * each)].copy_(first)
        return [list(range(1 + r * each, 1 + (r + 1) * each)) for r in range(requests)]

    def step_ms(
        self,
        runner: ModelRunner,
        pages: list[list[int]],
        length: int,
        steps: int = 12,
        num_drafts: int = 0,
    ) -> tuple[float, float]:
        """Medians of decode steps at one length; the first two are not counted.

        The second is how much of it the last replays took on the GPU.
        """
        times, replays = [], []
        for step in range(steps + 2):
            inputs = self._inputs(pages, length, num_drafts)
            torch.cuda.synchronize()
            began = time.perf_counter()
            runner.run(inputs, 0)
            if step >= 2:
                times.append(time.perf_counter() - began)
                replays.append(self.capture.start.elapsed_time(self.capture.stop))
        return median(times) * 1e3, median(replays)

    def ahead_ms(self, pages: list[list[int]], length: int, steps: int = 24) -> float:
        """Median from one replayed step to the next, each started ahead; the first are not counted.

        What a step follows are random tokens that lie on the device: those of a random model would
        soon be the same for all requests.
        """
        shape = (steps + 4, len(pages))
        given = [Choosing.of(ids) for ids in torch.randint(self.vocab_size, shape, device=DEVICE)]
        before, ends = None, []
        for chosen in given:
            inputs = [
                SequenceInput([0], length - 1, own, SampleInput(GREEDY, [1], []), follows=i)
                for i, own in enumerate(pages)
            ]
            behind = ReplayedStep(self.model, inputs, Replayed(chosen.ids_N, chosen))
            started = self.replaying.start(inputs, 0, behind)
            started.choose([True] * len(pages))
            if before is not None:
                before.outputs()
                ends.append(time.perf_counter())
            before = started
        torch.cuda.synchronize()
        return median(b - a for a, b in pairwise(ends[2:])) * 1e3

    def mixed_ms(self, pages: list[list[int]], length: int, chunk: int, steps: int = 12) -> float:
        """Median of steps of one decode a request and so many tokens of a prompt.

        The chunk is the beginning of a prompt and is written to the pages of the last request.
        """
        *decoding, own = pages
        times = []
        for _ in range(steps + 2):
            ids = torch.randint(self.vocab_size, (chunk,)).tolist()
            inputs = [SequenceInput(ids, 0, own, None), *self._inputs(decoding, length)]
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.replaying.run(inputs, 1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return median(times[2:]) * 1e3

    def step_split(self, pages: list[list[int]], length: int, steps: int = 4) -> Split:
        """Where the time of a replayed step goes; `step_ms` was called before."""
        inputs = [self._inputs(pages, length) for _ in range(steps)]
        return split(trace(partial(self.replaying.run, i, 0)) for i in inputs)

    def prompt_split(self) -> Split:
        """Where the time of a prompt of one chunk goes."""
        return split([trace(partial(self.prompt, CHUNK))])

    def _inputs(
        self, pages: list[list[int]], length: int, num_drafts: int = 0
    ) -> list[SequenceInput]:
        """A step of one new token a request, and drafts behind it."""
        width = 1 + num_drafts
        ids = torch.randint(self.vocab_size, (len(pages), width)).tolist()
        return [
            SequenceInput(tokens, length - width, own, SampleInput(GREEDY, [1], []), num_drafts)
            for tokens, own in zip(ids, pages, strict=True)
        ]


def floor_ms(layers: int, requests: int, length: int, row_bytes: int, width: int = 1) -> float:
    """Weights that a step of `width` tokens a request reads once, and the rows of every request."""
    attention = 7168 * (1536 + 576 + 128) + 24576 * 1536 + 7168 * 16384
    attention += 128 * 256 * 512 * 2 + 64 * 128 * 1536 * 2
    hit = 256 * (1 - (1 - 8 / 256) ** (requests * width)) + 1
    experts = hit * 3 * 2048 * 7168 + 256 * 7168 * 4
    weights = layers * attention + 3 * 18432 * 7168 + (layers - 1) * experts + 129280 * 7168 * 2
    read = min(length, 2048) * row_bytes + length * 132
    return (weights + layers * requests * read) / BYTES_PER_US / 1e3


def measure(args: argparse.Namespace, save: Callable[[dict], None]) -> None:
    model = new_model(args.layers)
    tokens = max(b * (n + PAGE) for b, n in DECODES)
    work = Slice(model, tokens, args.rows)
    work.prompt(CHUNK)
    took = min(work.prompt(CHUNK) for _ in range(2))
    row: dict = {"prompt": CHUNK, "tokens_per_second": round(CHUNK / took)}
    save(row | profiled(work.prompt_split, args.profile))
    done = CHUNK
    for requests, length in sorted(DECODES, key=lambda case: case[1]):
        if length > done:
            work.prompt(length - done, done)
            done = length
        pages = work.spread(requests, length)
        row = {"requests": requests, "context": length}
        # What nobody holds, here and behind the steps, is none of the graph's.
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        times = work.step_ms(work.replaying, pages, length)
        row["ms"] = round(work.ahead_ms(pages, length), 3)
        row["alone_ms"], row["replay_ms"] = (round(ms, 3) for ms in times)
        # The graph of this shape, its inputs, and what the pool of all graphs grew by.
        torch.cuda.empty_cache()
        row["graph_mib"] = round((free - torch.cuda.mem_get_info()[0]) / 2**20, 1)
        if requests in args.eager:
            row["eager_ms"] = round(work.step_ms(work.eager, pages, length)[0], 3)
        row["floor_ms"] = round(floor_ms(args.layers, requests, length, args.row_bytes), 3)
        save(row | profiled(partial(work.step_split, pages, length), args.profile))
    for requests, length, num_drafts in VERIFIES:
        save(verified(work, args, requests, length, num_drafts))


def verified(
    work: Slice, args: argparse.Namespace, requests: int, length: int, num_drafts: int
) -> dict:
    """A step with drafts beside one without."""
    pages = work.spread(requests, length)
    floors = [
        floor_ms(args.layers, requests, length, args.row_bytes, n + 1) for n in (0, num_drafts)
    ]
    plain, drafted = (
        work.step_ms(work.replaying, pages, length, num_drafts=n)[0] for n in (0, num_drafts)
    )
    gains = {
        str(chance): round(sum(chance**i for i in range(num_drafts + 1)) * plain / drafted, 2)
        for chance in CHANCES
    }
    return {
        "requests": requests,
        "context": length,
        "drafts": num_drafts,
        "alone_ms": round(drafted, 3),
        "plain_ms": round(plain, 3),
        "cost": round(drafted / plain, 3),
        "floor_cost": round(floors[1] / floors[0], 3),
        "gain": gains,
    }


def profiled(measure_split: Callable[[], Split], wanted: bool) -> dict:
    """The split's figures; its table is printed."""
    if not wanted:
        return {}
    measured = measure_split()
    print(measured.table(), flush=True)
    return measured.as_row()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rows", choices=("auto", "fp8"), default="fp8")
    parser.add_argument("--eager", type=int, nargs="*", default=[1], help="batches to run so too")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    args.row_bytes = 656 if args.rows == "fp8" else 1152
    report = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "layers": args.layers,
        "rows": args.rows,
        "figures": [],
    }

    def save(row: dict) -> None:
        print(json.dumps(row), flush=True)
        report["figures"].append(row)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    with torch.inference_mode():
        measure(args, save)


if __name__ == "__main__":
    main()
