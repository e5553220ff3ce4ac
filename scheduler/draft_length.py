"""How many drafts pay: chosen from what steps were measured to take and how many were accepted.

k drafts are worth their time if the tokens they are expected to add outweigh what the longer step
costs. Both are measured while serving, because they depend on machine, batch and text: a draft more
is nearly free for one request on a GPU, and a loss for a large batch on a CPU. The search starts
low, the lower the larger the batch. From the best length known it looks at a shorter one always,
and at a longer one where the times of its neighbours promise a gain, so lengths that cannot pay are
hardly ever tried.
"""

import math
from collections import Counter, deque
from statistics import median_low

MEASUREMENTS = 3
"""Steps of each kind that are tried before the choice is trusted."""
EXPLORE_EVERY = 64
"""So often a neighbour of the best length is measured anew: text and load change."""
LONGEST_START = 2
"""Where the search begins for a single request; batches twice as large begin one draft lower."""
RECENT_TIMES = 15
"""Steps of a kind that its time is the median of: one that was disturbed does not count."""
RECENT = 0.01
"""Weight of the newest draft in the running mean of many."""
WORTH = 1.02
"""A draft more has to make a step better by so much: less than that is noise."""
MANY = 8
"""Requests from which on a draft more has to be better by WORTH_OF_MANY. There prompts often join
the steps, which pay for drafts too: 32 requests on a CPU lost up to a third of their rate to drafts
that the times of pure steps called even."""
WORTH_OF_MANY = 1.1
UNKNOWN = 0.8
"""Chance of a first draft before any was verified."""


class DraftLength:
    """Chooses from 0 to `most` drafts for steps of a given number of requests.

    What it chooses changes the time of an answer, never its tokens.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self.most = most
        self._adaptive = adaptive
        # Chance of draft i, given that those before it were accepted; as far as any was verified.
        self._accepted: list[_Mean] = []
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._num_measured: Counter[tuple[int, int]] = Counter()
        self._num_choices = 0
        # Whose times of long ago end with the next one: what was measured while the machine was
        # busy would else look bad for good.
        self._tried_anew: set[tuple[int, int]] = set()

    def choose(self, num_requests: int) -> int:
        """Drafts for a step of that many decoding requests."""
        if not self._adaptive:
            return self.most
        self._num_choices += 1
        times = self._times(num_requests)
        if not times:
            return min(self.most, max(0, LONGEST_START + 1 - num_requests.bit_length()))
        margin = WORTH if num_requests < MANY else WORTH_OF_MANY
        worth = {k: self._worth(k, seconds, margin) for k, seconds in times.items()}
        best = max(worth, key=worth.__getitem__)
        below, above = best - 1, best + 1
        if below >= 0 and below not in times:
            return below
        if above <= self.most and above not in times:
            # Without drafts nothing is known of what one costs; else one more costs as the last.
            longer = times[best]
            if best:
                longer = max(longer, 2 * longer - times[below])
            if self._worth(above, longer, margin) > worth[best]:
                return above
        beside = [k for k in (above, below) if k in times]
        if beside and self._num_choices % EXPLORE_EVERY == 0:
            tried = beside[self._num_choices // EXPLORE_EVERY % len(beside)]
            self._tried_anew.add((_size(num_requests), tried))
            return tried
        return best

    def expected(self, num_drafts: int) -> float:
        """Tokens that a request gains in a step with so many drafts.

        A draft of which nothing is known is taken to be as good as the one before it.
        """
        total = chance = 1.0
        accepted = UNKNOWN
        for i in range(num_drafts):
            accepted = self._accepted[i].value if i < len(self._accepted) else accepted
            chance *= accepted
            total += chance
        return total

    def observe_time(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step of nothing but verifying took so long."""
        key = _size(num_requests), num_drafts
        times = self._seconds.setdefault(key, deque(maxlen=RECENT_TIMES))
        if self._num_measured[key] == 1 or key in self._tried_anew:
            # The first run of a kind may include what is done only once.
            times.clear()
            self._tried_anew.discard(key)
        self._num_measured[key] += 1
        times.append(seconds)

    def observe_acceptance(self, num_drafts: int, num_accepted: int) -> None:
        """Of a request's drafts the first `num_accepted` were right."""
        for i in range(min(num_accepted + 1, num_drafts)):
            if i == len(self._accepted):
                self._accepted.append(_Mean())
            self._accepted[i].add(float(i < num_accepted))

    def _times(self, num_requests: int) -> dict[int, float]:
        """Seconds of a step by the number of drafts, where they were measured often enough."""
        keys = {k: (_size(num_requests), k) for k in range(self.most + 1)}
        known = {k: key for k, key in keys.items() if self._num_measured[key] >= MEASUREMENTS}
        return {k: median_low(self._seconds[key]) for k, key in known.items()}

    def _worth(self, num_drafts: int, seconds: float, margin: float) -> float:
        return self.expected(num_drafts) / seconds / margin**num_drafts


class _Mean:
    """The mean of all values as long as they are few, later one in which old values fade."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(RECENT, 1 / self.count) * (value - self.value)


def _size(num_requests: int) -> int:
    """Batches of similar size are measured together: two classes for each doubling."""
    return int(2 * math.log2(num_requests)) if num_requests else -1
