"""Long lists of independent cases on every core, each with a line of JSON as soon as it is known.

A run that was stopped goes on where it was: cases that have a line in the file are not run again.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Case = list[Any]
"""What tells a case from all others, as JSON knows it."""


def new_parser(description: str | None, output: str) -> argparse.ArgumentParser:
    """The options that every such run has. output: name of its file if no other is given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("build") / output)
    return parser


def read_lines(output: Path) -> list[dict[str, Any]]:
    """What is known so far. A last line that was cut by the end of a run is not."""
    if not output.exists():
        return []
    return [json.loads(line) for line in output.read_text().splitlines() if line.endswith("}")]


def run_cases(
    run: Callable[[Case], dict[str, Any]], cases: Iterable[Case], output: Path, processes: int
) -> list[dict[str, Any]]:
    """Run what has no line yet, in the order given; returns the lines of all `cases`.

    run: a function of a module; its result may hold "difference", which is told at once.
    """
    cases = list(cases)
    lines = read_lines(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = [line["case"] for line in lines]
    missing = [(run, case) for case in cases if case not in known]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, torch.set_num_threads, (1,)) as pool, output.open("a") as file:
        for line in pool.imap_unordered(_timed, missing):
            file.write(json.dumps(line) + "\n")
            file.flush()
            if line.get("difference"):
                print(line["case"], line["difference"], file=sys.stderr, flush=True)
    return [line for line in read_lines(output) if line["case"] in cases]


def _timed(work: tuple[Callable[[Case], dict[str, Any]], Case]) -> dict[str, Any]:
    run, case = work
    start = time.process_time()
    found = run(case)
    return {"case": case} | found | {"seconds": round(time.process_time() - start, 3)}
