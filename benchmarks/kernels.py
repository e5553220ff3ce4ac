"""Time the attention kernels on a GPU, beside the kernels of other projects, in one run.

    python -m benchmarks.kernels [--only topk,logits] [--peers DIR] [--output FILE]

Every case has a floor (the fewest bytes over the memory's rate or the operations over the tensor
cores', whichever takes longer), our kernel and, with `--peers`, those of others on the same
tensors. All of a case are timed in turn, so that what changes on the GPU changes for all of them:
cold (the L2 cache overwritten before each call) and warm (calls back to back), as replays of a
captured graph, medians. Each result is checked against plain torch before it counts.

`--peers` names a folder of shared objects out of the projects' published wheels (benchmarks/
peers.py); nothing of them is part of this repository. `--untimed` only checks.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median

import torch
import triton

from benchmarks import attention_cases, index_cases, product_cases
from benchmarks.kernel_cases import Case, Entry, Section
from benchmarks.peers import Peers

FLUSH_BYTES = 256 << 20
# Names of our entries begin so; the others are peers.
OURS = "minidsa"

SECTIONS: dict[str, Section] = (
    index_cases.SECTIONS | attention_cases.SECTIONS | product_cases.SECTIONS
)


class Clock:
    """Times captured calls with events."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def measure(self, case: Case, rounds: int, repeats: int) -> None:
        graphs = [(entry, *self._capture(entry.run, repeats)) for entry in case.entries]
        for turn in range(rounds + 2):
            for entry, once, many in graphs:
                # The GPU is busy with the first call while the second is handed to it.
                cold = self._time(self.flush.zero_, once.replay)
                warm = self._time(many.replay, many.replay) / repeats
                # The first turns load what a graph's first replay loads.
                if turn >= 2:
                    entry.cold_us.append(cold)
                    entry.warm_us.append(warm)

    def _capture(
        self, run: Callable[[], object], repeats: int
    ) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        for graph, count in zip(graphs, (1, repeats), strict=True):
            with torch.cuda.graph(graph):
                for _ in range(count):
                    run()
        return graphs

    def _time(self, before: Callable[[], object], run: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3


def run_section(
    name: str, section: Section, peers: Peers, args: argparse.Namespace
) -> Iterator[dict]:
    """The rows of a section; a wrong result gets no time."""
    clock = Clock()
    for case in section(peers, args.quick):
        checks = {entry.name: _checked(entry) for entry in case.entries}
        case.entries = [e for e in case.entries if not checks[e.name].startswith("wrong")]
        if not args.untimed and case.entries:
            clock.measure(case, args.rounds, args.repeats)
        yield from _rows(name, case, checks)
        torch.cuda.empty_cache()


def _checked(entry: Entry) -> str:
    # A kernel that fails must not cost the others their figures.
    try:
        return entry.check()
    except Exception as error:
        return f"wrong: {type(error).__name__}: {str(error)[:300]}"


def _rows(section: str, case: Case, checks: dict[str, str]) -> Iterator[dict]:
    """What is known of each entry; ours also over the best peer."""
    cold = {e.name: median(e.cold_us) for e in case.entries if e.cold_us}
    warm = {e.name: median(e.warm_us) for e in case.entries if e.cold_us}
    others = [name for name in cold if not name.startswith(OURS)]
    best = min(others, key=cold.__getitem__, default=None)
    for name, check in checks.items():
        row = {"section": section, "kernel": case.kernel, "shape": case.shape, "entry": name}
        row |= {"check": check, "floor_us": round(case.floor_us, 2)}
        if name in cold:
            row |= {"cold_us": round(cold[name], 2), "warm_us": round(warm[name], 2)}
            row["share_of_floor"] = round(case.floor_us / cold[name], 3)
            if name.startswith(OURS) and best:
                row |= {"best_peer": best, "ratio": round(cold[name] / cold[best], 3)}
                row["ratio_warm"] = round(warm[name] / warm[best], 3)
        yield row


def table(rows: list[dict]) -> str:
    """Rows as text: cold and warm us, share of the floor, and ours over the best peer."""
    lines = [
        f"{'case':58s} {'entry':26s} {'cold':>9s} {'warm':>9s} {'floor':>6s} {'ratio':>6s}  check"
    ]
    for row in rows:
        times = (f"{row.get(key, 0):9.2f}" for key in ("cold_us", "warm_us"))
        share, ratio = row.get("share_of_floor", 0), row.get("ratio")
        lines.append(
            f"{row['kernel'] + ' ' + row['shape']:58s} {row['entry']:26s} {' '.join(times)} "
            f"{share:6.1%} {f'{ratio:6.3f}' if ratio else '      '}  {row['check']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma")
    parser.add_argument("--peers", type=Path, help="folder with other projects' shared objects")
    parser.add_argument("--output", type=Path, help="JSON file for all rows")
    parser.add_argument("--quick", action="store_true", help="the cases that goals are set for")
    parser.add_argument("--untimed", action="store_true", help="check only")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="calls of a warm measurement")
    args = parser.parse_args()
    peers, rows = Peers(args.peers), []
    for name in args.only.split(","):
        start = time.perf_counter()
        for row in run_section(name, SECTIONS[name], peers, args):
            rows.append(row)
            print(table([row]).splitlines()[1], flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if args.output:
            args.output.write_text(json.dumps(_report(peers, rows), indent=1) + "\n")
    print(table(rows))


def _report(peers: Peers, rows: list[dict]) -> dict:
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "peers": peers.versions,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
