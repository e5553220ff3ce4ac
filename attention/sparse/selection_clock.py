"""How long selections take, and how many keys they leave.

On a GPU a selection has only been launched when the host goes on, so its time lies between two
events, which are read once the device has passed them; nothing ever waits for them.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator

import torch

from .selection_counts import SelectionCounts

MILLISECONDS = 1e3


class SelectionClock:
    """Times what runs within `timing`, and counts the keys of steps."""

    def __init__(self, device: torch.device) -> None:
        self.counts = SelectionCounts()
        self._is_cuda = device.type == "cuda"
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def count_keys(self, kv_lens: Iterable[int], topk: int) -> None:
        """A step selects for requests of these lengths, its own tokens included."""
        used = [min(length, topk) for length in kv_lens]
        self.counts.num_rows += len(used)
        self.counts.num_keys += sum(used)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Around the selection of one layer; without effect while a graph is captured."""
        if not self._is_cuda:
            start = time.perf_counter()
            yield
            self._add(time.perf_counter() - start)
        elif torch.cuda.is_current_stream_capturing():
            yield
        else:
            self._settle()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._open.append((start, end))

    def _settle(self) -> None:
        """Add up what the device has passed."""
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            self._add(start.elapsed_time(end) / MILLISECONDS)

    def _add(self, seconds: float) -> None:
        self.counts.num_timed += 1
        self.counts.seconds += seconds
