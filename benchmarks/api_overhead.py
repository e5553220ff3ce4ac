"""What the API costs: delivered tokens beside the offline engine's, many streams, building a chunk.

The same prompts go, in turns, to the engine in this process without HTTP, and to a server as
streams. The client reads raw bytes, so that the third process on the cores is a small one; with two
cores it still takes a part of one, which a client on another machine would not. Run it from the
repository root, on an idle machine, as

    python -m benchmarks.api_overhead checkpoints/tiny-dsa --output FILE.json
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from minidsa.configs.engine import EngineConfig, SchedulerConfig, SpeculativeConfig
from minidsa.configs.sampling import SamplingParams
from minidsa.scheduler.offline import OfflineEngine
from minidsa.server.answers import Answer, Delta, DeltaChoice, encode_event

STREAMS, MANY, OUTPUT = 32, 200, 64
MOST_OVERHEAD = 0.25
MOST_CHUNK_MICROSECONDS = 5.0
_READY = re.compile(r"ready: http://127\.0\.0\.1:(\d+) ")
_COUNT = re.compile(rb'"completion_tokens":(\d+)')


class Server:
    """`minidsa serve` as a process, and a client that reads its streams as bytes."""

    def __init__(self, checkpoint: Path, threads: int, drafts: str) -> None:
        command = [sys.executable, "-m", "minidsa.server.cli", "serve", str(checkpoint)]
        command += ["--port", "0", "--num-threads", str(threads), "--speculative", drafts]
        command += ["--max-num-seqs", str(STREAMS), "--set", "engine.cache.prefix_reuse=false"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := _READY.match(line):
                self._port = int(found.group(1))
                return
        raise SystemExit("the server ended before it was ready")

    def run(self, prompts: list[list[int]]) -> tuple[float, int]:
        """Seconds for all prompts at once, and the tokens that were delivered."""
        return asyncio.run(self._run(prompts))

    async def _run(self, prompts: list[list[int]]) -> tuple[float, int]:
        start = time.perf_counter()
        counts = await asyncio.gather(*(self._stream(prompt) for prompt in prompts))
        return time.perf_counter() - start, sum(counts)

    async def _stream(self, prompt: list[int]) -> int:
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
        fields |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head.encode() + body)
        last = b""
        while piece := await reader.read(1 << 16):
            last = (last + piece)[-2000:]
        writer.close()
        found = _COUNT.search(last)
        return int(found.group(1)) if found and b"[DONE]" in last else 0

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)


def prompts_of(count: int, seed: int, vocab: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(draw.randint(16, 64))] for _ in range(count)]


def chunk_microseconds(repeats: int = 20_000) -> float:
    """What writing one chunk of a chat takes: its object, its JSON, its frame; the best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            choice = DeltaChoice(0, Delta(content=" token"))
            encode_event(Answer("chatcmpl-0123", "chat.completion.chunk", 1, "m", [choice]))
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / repeats


def measure(checkpoint: Path, threads: int, rounds: int, drafts: str) -> dict[str, Any]:
    """Rates in turns, so that what disturbs the machine disturbs both."""
    config = EngineConfig(
        num_threads=threads,
        dtype="float32",
        scheduler=SchedulerConfig(max_num_seqs=STREAMS),
        speculative=SpeculativeConfig(method=drafts),  # type: ignore[arg-type]
    )
    config = replace(config, cache=replace(config.cache, prefix_reuse=False))
    engine = OfflineEngine.load(checkpoint, config=config)
    params = SamplingParams(max_tokens=OUTPUT, seed=0, temperature=0.0)
    server = Server(checkpoint, threads, drafts)
    offline, served = [], []
    try:
        for turn in range(rounds + 1):
            prompts = prompts_of(STREAMS, turn, engine.info.vocab_size)
            start = time.perf_counter()
            answers = engine.generate(prompts, params, ignore_eos=True)
            count = sum(len(answer.token_ids) for answer in answers)
            offline.append(count / (time.perf_counter() - start))
            seconds, delivered = server.run(prompts)
            assert delivered == count, f"{delivered} of {count} tokens were delivered"
            served.append(delivered / seconds)
        seconds, delivered = server.run(prompts_of(MANY, 1000, engine.info.vocab_size))
    finally:
        server.stop()
    # The first turn warms both up.
    ratios = [ours / alone for ours, alone in zip(served[1:], offline[1:], strict=True)]
    return {
        "offline_tokens_per_second": statistics.median(offline[1:]),
        "served_tokens_per_second": statistics.median(served[1:]),
        "overhead": 1 - statistics.median(ratios),
        "overhead_by_turn": [1 - ratio for ratio in ratios],
        "many_streams": {
            "streams": MANY,
            "delivered": delivered,
            "expected": MANY * OUTPUT,
            "tokens_per_second": delivered / seconds,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="the cost of the API beside the offline engine")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", default="none", choices=("none", "mtp", "ngram"))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = measure(given.checkpoint, given.threads, given.rounds, given.drafts)
    found["chunk_microseconds"] = chunk_microseconds()
    many, overhead, chunk = found["many_streams"], found["overhead"], found["chunk_microseconds"]
    held = [
        (
            f"overhead at {STREAMS} streams: {overhead:.1%}, at most {MOST_OVERHEAD:.0%}",
            overhead <= MOST_OVERHEAD,
        ),
        (
            f"building a chunk: {chunk:.2f} µs, at most {MOST_CHUNK_MICROSECONDS:g}",
            chunk <= MOST_CHUNK_MICROSECONDS,
        ),
        (
            f"{MANY} streams at once: {many['delivered']} of {many['expected']} tokens",
            many["delivered"] == many["expected"],
        ),
    ]
    for text, is_held in held:
        print(f"{'ok    ' if is_held else 'FAILED'} {text}")
    if given.output is not None:
        machine = {"cores": os.cpu_count(), "processor": platform.processor()}
        when = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = {"date": when, "machine": machine, "threads": given.threads, **found}
        given.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(is_held for _, is_held in held) else 1


if __name__ == "__main__":
    sys.exit(main())
