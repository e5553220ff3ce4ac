"""What sparse attention has done since the start, in plain numbers; free of torch."""

from dataclasses import dataclass


@dataclass
class SelectionCounts:
    """Counters that only grow.

    num_timed, seconds: selections of one layer whose time is known, and that time. Those that a
        captured graph replays are not among them: they have no beginning that the host could see.
    num_rows, num_keys: requests in steps that selected, and the keys that the newest token of each
        attended to.
    """

    num_timed: int = 0
    seconds: float = 0.0
    num_rows: int = 0
    num_keys: int = 0
