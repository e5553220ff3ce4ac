"""`minidsa bench`: load on a running server, and how long its answers took.

Closed loop: so many requests at once, the next one when one ends. Open loop (`--rate`): requests
arrive at random (a Poisson process), whether the server keeps up or not, which is what users do.
Times: TTFT from sending to the first token, ITL between two pieces of a stream, TPOT the mean time
of a token behind the first, E2E the whole answer. Goodput counts the answers within both limits.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from .http_client import CallFailed, ServerAddress

PERCENTILES = (50, 90, 99)
_WORDS = ("river", "stone", "light", "seven", "green", "under", "paper", "north", "quiet", "table")


@dataclass(frozen=True)
class Load:
    """What is sent. `rate` is in requests a second; None: a closed loop of `concurrency`."""

    num_requests: int = 32
    concurrency: int = 8
    rate: float | None = None
    prompt_words: int = 64
    max_tokens: int = 64
    seed: int = 0
    ttft_limit: float = 1.0
    tpot_limit: float = 0.1


@dataclass
class Timing:
    """One answer; times in seconds."""

    ttft: float = math.nan
    e2e: float = math.nan
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


def bench(address: ServerAddress, load: Load, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a load to its end; returns the report. Raises CallFailed if every request failed."""
    draw = random.Random(load.seed)
    prompts = [
        " ".join(draw.choice(_WORDS) for _ in range(load.prompt_words))
        for _ in range(load.num_requests)
    ]
    at_once = load.num_requests if load.rate is not None else load.concurrency
    start = time.perf_counter()
    free = threading.Semaphore(at_once)
    running = []
    for prompt in prompts:
        if load.rate is not None:
            time.sleep(draw.expovariate(load.rate))
        free.acquire()
        running.append(_in_thread(partial(_ask, address, prompt, load.max_tokens), free.release))
    timings = [each.result() for each in running]
    report = summary(timings, time.perf_counter() - start, load)
    if report["completed"] == 0:
        raise CallFailed(f"every request failed; the first: {timings[0].error}")
    for line in shown(report):
        say(line)
    return report


def _in_thread(work: Callable[[], Timing], done: Callable[[], None]) -> "Future[Timing]":
    """What `work` returns or raises; its thread does not hold up a user who interrupts the run."""
    future: Future[Timing] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            done()

    threading.Thread(target=run, daemon=True).start()
    return future


def _ask(address: ServerAddress, prompt: str, max_tokens: int) -> Timing:
    timing, start = Timing(), time.perf_counter()
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = start
    try:
        for event in address.stream("/v1/completions", body):
            now = time.perf_counter()
            if event.get("usage"):
                timing.num_tokens = event["usage"]["completion_tokens"]
                timing.num_prompt_tokens = event["usage"]["prompt_tokens"]
            if not any(choice["text"] for choice in event["choices"]):
                continue
            if math.isnan(timing.ttft):
                timing.ttft = now - start
            else:
                timing.gaps.append(now - last)
            last = now
        timing.e2e = time.perf_counter() - start
        if math.isnan(timing.ttft):
            timing.ttft = timing.e2e  # a text of nothing is told of at its end
    except CallFailed as error:
        timing.error = str(error)
    except (KeyError, TypeError, AttributeError) as error:
        timing.error = f"an event of the stream is no completion's: {error!r}"
    return timing


def summary(timings: Sequence[Timing], seconds: float, load: Load) -> dict[str, Any]:
    """The report of a run that took `seconds`: counts, rates, and percentiles in milliseconds."""
    good = [timing for timing in timings if timing.error is None]
    within = [t for t in good if t.ttft <= load.ttft_limit and t.tpot <= load.tpot_limit]
    times = {
        "ttft": [timing.ttft for timing in good],
        "tpot": [timing.tpot for timing in good if timing.num_tokens > 1],
        "itl": [gap for timing in good for gap in timing.gaps],
        "e2e": [timing.e2e for timing in good],
    }
    return {
        "load": asdict(load),
        "seconds": seconds,
        "completed": len(good),
        "failed": len(timings) - len(good),
        "errors": sorted({timing.error for timing in timings if timing.error is not None}),
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": sum(timing.num_tokens for timing in good) / seconds,
        "prompt_tokens_per_second": sum(timing.num_prompt_tokens for timing in good) / seconds,
        "goodput_per_second": len(within) / seconds,
        "milliseconds": {name: _percentiles(values) for name, values in times.items()},
        "quantiles_milliseconds": {name: _quantiles(values) for name, values in times.items()},
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """By the nearest rank, so each is a time that was measured."""
    ordered = sorted(values)
    ranks = {p: max(math.ceil(p / 100 * len(ordered)) - 1, 0) for p in PERCENTILES}
    return {f"p{p}": 1000 * ordered[rank] if ordered else None for p, rank in ranks.items()}


def _quantiles(values: Sequence[float]) -> list[float]:
    """Every hundredth of the values, the least and the greatest among them; for a picture."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [1000 * ordered[round(last * part / 100)] for part in range(101)] if ordered else []


def shown(report: dict[str, Any]) -> list[str]:
    """The report for a reader, a line each."""
    lines = [
        f"{report['completed']} answered, {report['failed']} failed in {report['seconds']:.1f} s",
        f"{report['tokens_per_second']:.1f} tokens/s behind "
        f"{report['prompt_tokens_per_second']:.1f} prompt tokens/s, "
        f"{report['requests_per_second']:.2f} requests/s, "
        f"{report['goodput_per_second']:.2f} within the limits",
    ]
    for name, values in report["milliseconds"].items():
        parts = [f"{p} {'-' if ms is None else format(ms, '.1f')}" for p, ms in values.items()]
        lines.append(f"{name.upper():5}{'  '.join(parts)} ms")
    return lines + [f"error: {error}" for error in report["errors"]]
