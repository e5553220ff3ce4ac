"""When the tokens of a request came: what its histograms are made of.

Of a request with several choices each has times of its own; the first token is that of whichever
choice was first.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .metrics import Metrics


@dataclass
class _ChoiceTimes:
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    queue_seconds: float | None = None


class RequestTimes:
    """The times of one request; `count` every output, `finish` in the end."""

    def __init__(self, num_choices: int, metrics: Metrics) -> None:
        self._arrival = time.monotonic()
        self._choices = [_ChoiceTimes() for _ in range(num_choices)]
        self._finished = metrics.finished
        self._observed = metrics.observed
        self.to_first: float | None = None

    def count(self, index: int, num_tokens: int, queue_seconds: float | None) -> None:
        """Tokens of a choice arrived now; those of one step share the time since the step before.

        queue_seconds: how long the choice waited for its first step; said once.
        """
        choice = self._choices[index]
        if queue_seconds is not None:
            choice.queue_seconds = queue_seconds
            self._observed.queue.observe(queue_seconds)
        if num_tokens <= 0:
            return
        now = time.monotonic()
        if self.to_first is None:
            self.to_first = now - self._arrival
            self._observed.first_token.observe(self.to_first)
        if choice.first is None:
            choice.first = now
            waited = now - self._arrival - (choice.queue_seconds or 0.0)
            self._observed.prefill.observe(max(waited, 0.0))
        else:
            self._observed.inter_token.observe((now - choice.last) / num_tokens)
        choice.last = now
        choice.num_tokens += num_tokens

    def finish(self, reasons: Sequence[str]) -> None:
        """The request is over, each of its choices for a reason."""
        self._observed.whole.observe(time.monotonic() - self._arrival)
        for reason in reasons:
            self._finished[reason].inc()
        for choice in self._choices:
            if choice.first is None:
                continue
            seconds = choice.last - choice.first
            self._observed.decode.observe(seconds)
            if choice.num_tokens > 1:
                self._observed.per_output_token.observe(seconds / (choice.num_tokens - 1))
