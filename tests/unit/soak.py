"""The state machines at nightly size: random histories until so many operations were made.

    PYTHONPATH=tests python tests/unit/soak.py --operations 1000000 --seed 1

Each round has a seed of its own, so a finding is found again by its seed; hypothesis then prints
the shortest history that shows it. An operation is one rule: a request that comes, a few steps, an
abort, a flush; all invariants are checked after each.
"""

import argparse
import json
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test
from test_cache_machine import CacheMachine
from test_pool_machine import PoolMachine
from test_scheduler_machine import SchedulerMachine

MACHINES = {
    "pool": (PoolMachine, 0.1),
    "cache": (CacheMachine, 0.3),
    "scheduler": (SchedulerMachine, 0.6),
}
ROUND = settings(
    max_examples=100,
    stateful_step_count=60,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.generate, Phase.shrink],
)


class Count:
    """Operations made so far."""

    def __init__(self) -> None:
        self.operations = 0


def counted(machine: type[RuleBasedStateMachine], count: Count) -> type[RuleBasedStateMachine]:
    """The machine, with its operations counted."""

    class Counted(machine):
        @invariant()
        def count_one(self):
            count.operations += 1

    return Counted


def soak(machine: type[RuleBasedStateMachine], operations: int, first_seed: int) -> dict:
    """Rounds until so many operations were made; raises what a machine finds."""
    count, rounds, start = Count(), 0, time.perf_counter()
    while count.operations < operations:
        number = first_seed + rounds
        try:
            run_state_machine_as_test(seed(number)(counted(machine, count)), settings=ROUND)
        except BaseException as error:
            error.add_note(f"{machine.__name__}, seed {number}")
            raise
        rounds += 1
    seconds = time.perf_counter() - start
    return {
        "operations": count.operations,
        "rounds": rounds,
        "first_seed": first_seed,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000, help="of all machines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report = {}
    for name, (machine, share) in MACHINES.items():
        report[name] = soak(machine, int(share * arguments.operations), arguments.seed)
        print(name, report[name], flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
