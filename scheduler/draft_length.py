"""How many drafts pay: chosen from what steps were measured to take and how many were accepted.

k drafts are worth their time if the tokens they are expected to add outweigh what the longer step
costs. Both are measured while serving, because they depend on machine, batch and text: a draft more
is nearly free for one request on a GPU, and a loss for a large batch on a CPU. The search starts
low, the lower the larger the batch, and climbs while a neighbour of the best length is better, so
lengths that cannot pay are hardly ever tried.
"""

from collections import Counter

MEASUREMENTS = 3
"""Steps of each kind that are tried before the choice is trusted."""
EXPLORE_EVERY = 64
"""So often a neighbour of the best length is tried: text and load change."""
LONGEST_START = 2
"""Where the search begins for a single request; batches twice as large begin one draft lower."""
RECENT = 0.1
"""Weight of the newest measurement in a running mean."""


class DraftLength:
    """Chooses from 0 to `most` drafts for steps of a given number of requests.

    What it chooses changes the time of an answer, never its tokens.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self.most = most
        self._adaptive = adaptive
        self._accepted = [1.0] * most  # chance of draft i, given that those before it were accepted
        self._seconds: dict[tuple[int, int], float] = {}
        self._measured: Counter[tuple[int, int]] = Counter()
        self._num_choices = 0

    def choose(self, num_requests: int) -> int:
        """Drafts for a step of that many decoding requests."""
        if not self._adaptive:
            return self.most
        size = _size(num_requests)
        self._num_choices += 1
        known = [k for k in range(self.most + 1) if self._measured[size, k] >= MEASUREMENTS]
        if not known:
            return min(self.most, max(0, LONGEST_START + 1 - size))
        best = max(known, key=lambda k: self.expected(k) / self._seconds[size, k])
        beside = [k for k in (best + 1, best - 1) if 0 <= k <= self.most]
        untried = [k for k in beside if k not in known]
        if untried:
            return untried[0]
        if beside and self._num_choices % EXPLORE_EVERY == 0:
            return beside[self._num_choices // EXPLORE_EVERY % len(beside)]
        return best

    def expected(self, num_drafts: int) -> float:
        """Tokens that a request gains in a step with so many drafts."""
        total = chance = 1.0
        for accepted in self._accepted[:num_drafts]:
            chance *= accepted
            total += chance
        return total

    def observe_time(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step of nothing but verifying took so long."""
        key = (_size(num_requests), num_drafts)
        # The first run of a kind may include what is done only once.
        if self._measured[key] == 1:
            self._seconds[key] = seconds
        elif self._measured[key]:
            self._seconds[key] += RECENT * (seconds - self._seconds[key])
        self._measured[key] += 1

    def observe_acceptance(self, num_drafts: int, num_accepted: int) -> None:
        """Of a request's drafts the first `num_accepted` were right."""
        for i in range(min(num_accepted + 1, num_drafts)):
            hit = float(i < num_accepted)
            self._accepted[i] += RECENT * (hit - self._accepted[i])


def _size(num_requests: int) -> int:
    """Batches of similar size are measured together."""
    return num_requests.bit_length()
