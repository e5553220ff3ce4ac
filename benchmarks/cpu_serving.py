"""Tokens per second on the CPU: this server over HTTP beside transformers' `generate`.

All run the same checkpoint in fp32 with the same number of threads, in turns within one run, so the
ratios hold even where the machine is noisy: this server as it starts by default, this server
without drafts, and transformers. Prompts are held-out text of the kind that tiny-dsa was trained
on, new ones in each round, so no prefix is in the cache. The ids are compared too: a fast wrong
answer is no answer. They may differ where index scores are exactly equal: transformers breaks such
ties in no order, this server takes the lower position. Run it from the repository root as

    python -m benchmarks.cpu_serving CHECKPOINT --threads 1 --output FILE.json
"""

import argparse
import asyncio
import datetime
import json
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from torch import Tensor

from training.corpus import Mix, Source, held_out_batch

MODEL = "benchmark"


@dataclass(frozen=True)
class Job:
    """One request: prompt ids and the exact number of tokens to generate."""

    prompt: list[int]
    output_length: int


class Ours:
    """A server process and the HTTP client that talks to it."""

    def __init__(self, checkpoint: Path, threads: int, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "minidsa.server.cli", "serve", str(checkpoint)]
        command += ["--port", str(port), "--served-model-name", MODEL]
        command += ["--num-threads", str(threads), "--dtype", "float32", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not self._is_ready():
            if self.process.poll() is not None:
                raise SystemExit("the server ended before it was ready")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def run(self, jobs: list[Job]) -> tuple[float, list[list[int]], list[float]]:
        """Seconds for all jobs at once, their ids, and the time to each one's first token."""
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: list[Job]) -> tuple[float, list[list[int]], list[float]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:
            start = time.perf_counter()
            answers = await asyncio.gather(*(self._one(client, job) for job in jobs))
            seconds = time.perf_counter() - start
        return seconds, [ids for ids, _ in answers], [first for _, first in answers]

    async def _one(self, client: httpx.AsyncClient, job: Job) -> tuple[list[int], float]:
        body = {
            "model": MODEL,
            "prompt": job.prompt,
            "max_tokens": job.output_length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        start, first, ids = time.perf_counter(), 0.0, []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                if choice.get("token_ids"):
                    first = first or time.perf_counter() - start
                    ids += choice["token_ids"]
        return ids, first

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


class Theirs:
    """transformers in this process; a batch is padded on the left and runs to its longest job."""

    def __init__(self, checkpoint: Path) -> None:
        # Typed as Any: transformers' stubs do not see that its models can generate.
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> tuple[float, list[list[int]], list[float]]:
        """Seconds for one `generate` over all jobs, the ids each job asked for, no first times."""
        width = max(len(job.prompt) for job in jobs)
        steps = max(job.output_length for job in jobs)
        ids = torch.tensor([[0] * (width - len(j.prompt)) + j.prompt for j in jobs])
        mask = torch.tensor([[0] * (width - len(j.prompt)) + [1] * len(j.prompt) for j in jobs])
        start = time.perf_counter()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
        rows = out[:, width:].tolist()
        return seconds, [r[: j.output_length] for r, j in zip(rows, jobs, strict=True)], []


class Text:
    """An endless row of held-out documents, of which each prompt takes the next piece."""

    def __init__(self, checkpoint: Path) -> None:
        self._file = str(checkpoint / "tokenizer.json")
        self._rows = 0
        self._left: Tensor = torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> list[int]:
        while len(self._left) < count:
            source = Source(self._file, Mix(), rows=1, length=4094, seed=0)
            self._left = torch.cat([self._left, held_out_batch(source, 1, self._rows)[0][0]])
            self._rows += 1
        piece, self._left = self._left[:count], self._left[count:]
        return piece.tolist()


def make_jobs(text: Text, prompts: list[int], outputs: list[int]) -> list[Job]:
    return [Job(text.take(p), o) for p, o in zip(prompts, outputs, strict=True)]


def compare(
    runners: dict[str, Ours | Theirs], text: Text, case: tuple[list[int], list[int]], rounds: int
) -> dict:
    """Run all in turns; medians of tokens per second and how many answers are equal."""
    prompts, outputs = case
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    firsts: list[float] = []
    num_equal = 0
    for number in range(rounds + 1):
        jobs = make_jobs(text, prompts, outputs)
        answers: dict[str, list[list[int]]] = {}
        for name, runner in runners.items():
            elapsed, answers[name], first = runner.run(jobs)
            if number:  # the first round warms up, uncounted
                seconds[name].append(elapsed)
                firsts += first if name == "ours" else []
        if answers["ours"] != answers["without drafts"]:
            raise SystemExit("drafts changed a token")
        pairs = zip(answers["ours"], answers["transformers"], strict=True)
        num_equal += sum(a == b for a, b in pairs)
    rates = {name: sum(outputs) / statistics.median(values) for name, values in seconds.items()}
    theirs = rates["transformers"]
    return {
        "requests": len(prompts),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio": {name: round(rate / theirs, 2) for name, rate in rates.items()},
        "seconds": {k: [round(s, 3) for s in v] for k, v in seconds.items()},
        "time_to_first_token_ms": round(statistics.median(firsts) * 1000, 1),
        "answers_equal": f"{num_equal}/{len(prompts) * (rounds + 1)}",
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description="ours over HTTP beside transformers' generate")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    rng = random.Random(0)
    mixed = [rng.choice([16, 32, 64, 128, 256]) for _ in range(32)]
    cases = {
        "one stream, 32 + 128": ([32], [128]),
        "one stream, 1024 + 64": ([1024], [64]),
        "32 requests, mixed prompts, 64 each": (mixed, [64] * 32),
        "32 requests, mixed prompts and outputs": (
            mixed,
            [rng.choice([16, 32, 64, 128]) for _ in range(32)],
        ),
    }
    text, results = Text(args.checkpoint), {}
    ours = Ours(args.checkpoint, args.threads)
    plain = Ours(args.checkpoint, args.threads, "--speculative", "none")
    try:
        runners = {
            "ours": ours,
            "without drafts": plain,
            "transformers": Theirs(args.checkpoint),
        }
        for name, case in cases.items():
            results[name] = compare(runners, text, case, args.rounds)
            line = {k: v for k, v in results[name].items() if not isinstance(v, list)}
            print(name, json.dumps(line), flush=True)
    finally:
        ours.stop()
        plain.stop()
    report = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "threads": args.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "checkpoint": args.checkpoint.name,
        "dtype": "float32",
        "cases": results,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
