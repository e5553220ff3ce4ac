"""What the scheduler and the cache cost a step, without a model.

Requests with tables of 32k tokens decode beside each other; a step is `schedule`, `commit` of
made-up results and the counts that are sent. Then a prompt of 32k tokens is found in the cache.
Times are of this process on its core, so what else runs there is not counted:

    python benchmarks/scheduler.py --output benchmarks/results/scheduler.json
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

from minidsa.configs.engine import SchedulerConfig
from minidsa.configs.sampling import SamplingParams
from minidsa.kv_cache.cache import KvCache
from minidsa.model.sequence import SequenceOutput
from minidsa.scheduler.batch import Step
from minidsa.scheduler.messages import Submit
from minidsa.scheduler.scheduler import Scheduler

TOKENS = 32768
RUNNING = (32, 64, 128, 192, 256)
STEPS = 400
RUNS = 5  # of each size; the one that was disturbed least counts
HITS = 9


def new_scheduler(seats: int, page_size: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=2 * seats * TOKENS)
    pages = seats * (TOKENS + STEPS + page_size) // page_size + 2 * seats
    return Scheduler(config, KvCache(pages, page_size), 2 * TOKENS, 1 << 17)


def ask(name: int, prompt: list[int], outputs: int) -> Submit:
    return Submit(str(name), prompt, SamplingParams(max_tokens=outputs, seed=0, temperature=0.0))


def results(step: Step) -> list[SequenceOutput]:
    return [SequenceOutput(token_ids=[7]) for _ in step.work]


def microseconds_a_step(seats: int, page_size: int) -> dict[str, float]:
    """Median and tenth-worst of the steps in which `seats` requests decode."""
    scheduler = new_scheduler(seats, page_size)
    rest = list(range(1000, 1000 + TOKENS - 1))
    for name in range(seats):
        scheduler.add(ask(name, [name, *rest], STEPS + 10))
    step = scheduler.schedule()
    scheduler.commit(step, results(step))
    times = []
    made = results(scheduler.schedule())
    for _ in range(STEPS):
        start = time.process_time()
        step = scheduler.schedule()
        scheduler.commit(step, made)
        scheduler.check_idle()
        scheduler.stats()
        times.append((time.process_time() - start) * 1e6)
    assert len(step.work) == seats
    return {"median": statistics.median(times), "p90": sorted(times)[STEPS * 9 // 10]}


def milliseconds_a_hit(page_size: int) -> dict[str, float]:
    """From the arrival of a cached prompt of TOKENS tokens to the step that computes its rest."""
    scheduler = new_scheduler(2, page_size)
    prompt = list(range(1000, 1000 + TOKENS + 1))
    times = []
    for name in range(HITS + 1):
        start = time.process_time()
        scheduler.add(ask(name, prompt, 1))
        step = scheduler.schedule()
        taken = (time.process_time() - start) * 1e3
        (output,) = scheduler.commit(step, results(step))
        if name:
            assert output.cached_tokens == TOKENS
            times.append(taken)
    return {"median": statistics.median(times), "worst": max(times)}


def undisturbed(measure, *sizes: int) -> dict[str, float]:
    """The run with the lowest median."""
    return min((measure(*sizes) for _ in range(RUNS)), key=lambda times: times["median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    steps = {str(n): undisturbed(microseconds_a_step, n, 64) for n in RUNNING}
    report = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "tokens": TOKENS,
        "microseconds_a_step": steps,
        "milliseconds_a_hit": {str(n): undisturbed(milliseconds_a_hit, n) for n in (16, 64)},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
