"""Where the time of a step goes on the GPU: kernels by name, by part of the model, and gaps.

The profiler sees the kernels of a replayed graph one by one, but not the operations that launched
them, so a kernel's part is told by its name. Products of cuBLAS are projections, the head among
them; what no part claims is "other". Tracing makes the gaps between kernels longer, not the
kernels.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

# The first that a kernel's name contains decides.
PARTS = (
    ("indexer", ("_logits", "_quantise_queries")),
    ("top-k", ("_select",)),
    ("attention", ("_attend", "_join_parts", "_absorb", "_unabsorb", "_write")),
    ("experts", ("_products", "_rank", "_cut", "_combine", "_choose_experts", "_fp32_product")),
    ("sampling", ("_best_",)),
    ("norms, rope", ("_norm_rows", "_quantise", "_finish")),
    ("projections", ("_linear", "_add_parts", "nvjet", "gemm", "gemv", "splitK")),
)


@dataclass(frozen=True)
class Kernel:
    """One launch: times in microseconds."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Split:
    """Milliseconds of one step: `parts` by name, the span from first to last, gaps within it."""

    launches: float
    span: float
    gaps: float
    parts: dict[str, float]
    kernels: list[tuple[str, float, float]]  # name, launches and microseconds a step

    def as_row(self) -> dict:
        return {
            "launches": round(self.launches),
            "gpu_ms": round(self.span, 3),
            "gaps_ms": round(self.gaps, 3),
            "parts_ms": {part: round(ms, 3) for part, ms in self.parts.items()},
        }

    def table(self, most: int = 40) -> str:
        lines = [
            f"  {us:9.1f} us {count:6.1f} x {us / count:8.2f}  {part_of(name):<12} {name[:90]}"
            for name, count, us in self.kernels[:most]
        ]
        return "\n".join(lines)


def part_of(name: str) -> str:
    """The part of the model that a kernel of this name belongs to."""
    for part, marks in PARTS:
        if any(mark in name for mark in marks):
            return part
    return "other"


def trace(run: Callable[[], object]) -> list[Kernel]:
    """The kernels and copies that `run` has the GPU do, in the order of their start."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.events() or []
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA"
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def split(steps: Iterable[list[Kernel]]) -> Split:
    """The mean of several traces of the same step."""
    traces = list(steps)
    share = 1 / len(traces)
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    span = busy = 0.0
    for kernels in traces:
        end = kernels[0].start
        span += max(kernel.stop for kernel in kernels) - end
        for kernel in kernels:
            times[kernel.name] += kernel.stop - kernel.start
            counts[kernel.name] += 1
            busy += max(0.0, kernel.stop - max(end, kernel.start))
            end = max(end, kernel.stop)
    parts: defaultdict[str, float] = defaultdict(float)
    for name, us in times.items():
        parts[part_of(name)] += us * share / 1e3
    ranked = sorted(times, key=lambda name: -times[name])
    return Split(
        counts.total() * share,
        span * share / 1e3,
        (span - busy) * share / 1e3,
        dict(sorted(parts.items(), key=lambda item: -item[1])),
        [(name, counts[name] * share, times[name] * share) for name in ranked],
    )
