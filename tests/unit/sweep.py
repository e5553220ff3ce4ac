"""The long equality sweep: 2000 random settings of each bed, in as many processes as are wanted.

    make sweep ARGS="--processes 8"

`tests/equality.py` says what is drawn and compared. Ten settings are a case; a run that was stopped
goes on where it was. The exit status says whether every answer was its own, and whether what the
sweep is about was met.
"""

import functools
import sys
from collections import Counter
from typing import Any

from equality import BEDS, Sweep
from many_cases import Case, new_parser, run_cases

FIRST_SEED = 1000
SETTINGS = 10  # a case


@functools.cache
def sweep_of(bed: str) -> Sweep:
    return Sweep(BEDS[bed]())


def settings_from(case: Case) -> dict[str, Any]:
    """Ten settings from a seed on: the first difference, and how often what it is about was met."""
    bed, seed = case
    sweep = sweep_of(bed)
    sweep.met.clear()
    found = [sweep.difference(seed + i) for i in range(SETTINGS)]
    return {"difference": next(filter(None, found), None), "met": dict(sweep.met)}


def main() -> int:
    parser = new_parser(__doc__, "sweep.jsonl")
    parser.add_argument("--settings", type=int, default=2000, help="of each bed")
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.settings, SETTINGS)
    cases = [[bed, seed] for seed in seeds for bed in BEDS]
    lines = run_cases(settings_from, cases, arguments.output, arguments.processes)
    failed = False
    for bed in BEDS:
        of_bed = [line for line in lines if line["case"][0] == bed]
        met = sum((Counter(line["met"]) for line in of_bed), Counter())
        num_different = sum(line["difference"] is not None for line in of_bed)
        seconds = sum(line["seconds"] for line in of_bed)
        print(
            f"{bed}: {len(of_bed) * SETTINGS} settings, {num_different} cases with a difference, "
            f"met {dict(met)}, {seconds:.0f} s of processor time"
        )
        failed |= num_different > 0 or len(met) < 3
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
