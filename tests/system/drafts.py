"""The long run of the draft matrix: 500 prompts, every feature, both drafters, every k from 0 to 7.

    make drafts ARGS="--processes 8"

`tests/draft_matrix.py` says what is compared. Fifty prompts of a feature are a case, with all of
its runs; a run that was stopped goes on where it was. The exit status says whether there
was no difference.
"""

import sys
from collections import Counter
from typing import Any

from draft_matrix import FEATURES, DraftBy, Matrix
from many_cases import Case, new_parser, run_cases

PROMPTS = 50  # a case
DRAFTERS: tuple[DraftBy, ...] = ("mtp", "ngram")


def compare(case: Case) -> dict[str, Any]:
    """All runs of some prompts: the first difference, and what was met."""
    name, first = case
    matrix = Matrix(name, range(first, first + PROMPTS))
    # Without drafts n-grams change nothing: that is the run that everything is compared with.
    runs: list[tuple[DraftBy, int]] = [
        (drafter, k) for drafter in DRAFTERS for k in range(drafter == "ngram", 8)
    ]
    found = [matrix.difference(drafter, k) for drafter, k in runs]
    return {"difference": next(filter(None, found), None), "met": dict(matrix.met)}


def main() -> int:
    parser = new_parser(__doc__, "drafts.jsonl")
    parser.add_argument("--prompts", type=int, default=500, help="of each feature")
    arguments = parser.parse_args()
    cases = [[name, first] for first in range(0, arguments.prompts, PROMPTS) for name in FEATURES]
    lines = run_cases(compare, cases, arguments.output, arguments.processes)
    for name in FEATURES:
        of_name = [line for line in lines if line["case"][0] == name]
        met = sum((Counter(line["met"]) for line in of_name), Counter())
        differing = sum(line["difference"] is not None for line in of_name)
        print(f"{name}: {len(of_name) * PROMPTS} prompts, {differing} differences, {dict(met)}")
    seconds = sum(line["seconds"] for line in lines)
    print(f"{len(lines)} of {len(cases)} cases, {seconds:.0f} s of processor time")
    return int(len(lines) < len(cases) or any(line["difference"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
