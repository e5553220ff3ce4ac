"""A 16B-A3B model of the V3 architecture at full depth under offered load, on one GPU.

    python -m benchmarks.moonlight_shape [--rates 2,8,16,32] [--seconds 8] [--output FILE]

Sizes of Moonlight-16B-A3B, random bf16 weights made on the device. Requests of 512 prompt tokens
and 128 generated ones arrive at random (a Poisson process of each rate) at the scheduler, which
drives the runner as behind the server; text and HTTP are left out. Told are the tokens a second,
and percentiles of the time to the first token (TTFT, from arrival) and between tokens (TPOT).
"""

import argparse
import json
import random
import time
from collections import deque
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

import torch
import triton

from minidsa.configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.cache import KvCache
from minidsa.model.loading import check_start
from minidsa.model.sequence import SequenceInput
from minidsa.scheduler.messages import Submit
from minidsa.scheduler.pipeline import Pipeline
from minidsa.scheduler.scheduler import Scheduler

PAGE, PAGES = 64, 4096
PROMPT, ANSWER = 512, 128
LIMITS = SchedulerConfig(
    max_num_seqs=128, max_num_batched_tokens=8192, max_prefill_tokens=2048, max_queue=100_000
)
MOONLIGHT = {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
PARAMS = SamplingParams(max_tokens=ANSWER, seed=0, temperature=0.0)


@dataclass
class Timeline:
    """When a request came, when its first and its newest token did, and how many there are."""

    arrived: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class Bed:
    """What a server with this model starts, and a scheduler that is as good as new every time."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.free = torch.cuda.mem_get_info()[0]
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MOONLIGHT))
            start = check_start(
                EngineConfig(
                    model=folder,
                    load_format="dummy",
                    device="cuda",
                    max_model_len=PROMPT + ANSWER,
                    scheduler=LIMITS,
                    cache=CacheConfig(page_size=PAGE, num_pages=PAGES),
                )
            )
            loaded = start.load()
        loaded.prepare()
        self.planned = start.memory.total_bytes
        self.runner, self.vocab_size = loaded.runner, loaded.info.vocab_size

    def compute_largest_step(self) -> None:
        """Prompts of as many tokens as a step may have: what the plan counts with."""
        each = -(-PROMPT // PAGE)
        count = (LIMITS.max_num_batched_tokens or PROMPT) // PROMPT
        pages = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(count)]
        self.runner.run([SequenceInput([1] * PROMPT, 0, own, None) for own in pages], count)

    def memory(self) -> dict[str, float]:
        """GiB that the plan of the start says, and those that are taken by now."""
        taken = self.free - torch.cuda.mem_get_info()[0]
        planned, measured = (round(size / 2**30, 2) for size in (self.planned, taken))
        return {"planned_gib": planned, "measured_gib": measured}

    def load(self, rate: float, seconds: float, seed: int) -> dict[str, float]:
        """Offer `rate` requests a second for so many seconds, and wait for all answers."""
        cache = KvCache(PAGES, PAGE, False)
        scheduler = Scheduler(LIMITS, cache, PROMPT + ANSWER, self.vocab_size)
        dice = random.Random(seed)
        due: deque[tuple[float, Submit]] = deque()
        at = dice.expovariate(rate)
        while at < seconds:
            prompt = [dice.randrange(self.vocab_size) for _ in range(PROMPT)]
            due.append((at, Submit(str(len(due)), prompt, PARAMS)))
            at += dice.expovariate(rate)
        lines = {submit.request_id: Timeline(at) for at, submit in due}
        pipeline = Pipeline(self.runner, scheduler)
        began = time.perf_counter()
        while due or scheduler.has_work:
            now = time.perf_counter() - began
            while due and due[0][0] <= now:
                scheduler.add(due.popleft()[1])
            if not scheduler.has_work:
                time.sleep(max(0.0, due[0][0] - now))
                continue
            self._step(pipeline, lines, began)
        return summary(list(lines.values()), rate)

    def _step(self, pipeline: Pipeline, lines: dict[str, Timeline], began: float) -> None:
        for output in pipeline.advance()[1]:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            line = lines[output.request_id]
            line.last = time.perf_counter() - began
            line.first = line.first or line.last
            line.tokens += len(output.token_ids)


def summary(lines: list[Timeline], rate: float) -> dict[str, float]:
    """Throughput, and percentiles in milliseconds."""
    took = max(line.last for line in lines) - min(line.arrived for line in lines)
    row: dict[str, float] = {"rate": rate, "requests": len(lines)}
    row["tokens_per_second"] = round(sum(line.tokens for line in lines) / took)
    ttft = [1e3 * (line.first - line.arrived) for line in lines]
    tpot = [1e3 * (line.last - line.first) / max(1, line.tokens - 1) for line in lines]
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        cuts = quantiles(values, n=100, method="inclusive")
        row |= {f"{name}_p{p}": round(cuts[p - 1], 2) for p in (50, 90, 99)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="2,8,16,32", help="requests a second, by comma")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each rate")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    bed = Bed()
    rates = [float(rate) for rate in args.rates.split(",")]
    report = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "prompt": PROMPT,
        "answer": ANSWER,
        "figures": [],
    }
    # What the start has not compiled and captured is, before anything is timed.
    bed.load(rates[-1], args.seconds / 2, 0)
    bed.compute_largest_step()
    for rate in rates:
        row = bed.load(rate, args.seconds, 1)
        report["figures"].append(row)
        report["memory"] = bed.memory()
        print(json.dumps(row), json.dumps(report["memory"]), flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
