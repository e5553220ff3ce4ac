"""Weights on their way from mapped files to a GPU: several threads, each through pinned memory.

A copy from mapped memory would wait for one page after the other and be staged by the driver, one
thread at a time. Here each thread reads a piece into pinned memory of its own, from which the GPU
fetches it, while other threads read theirs.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

MOST_THREADS = 4
PIECE_BYTES = 8 << 20


class Uploader:
    """Moves tensors to one GPU; callable in the threads of its own `each`."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._piece_bytes = piece_bytes
        self._own = threading.local()

    def each(self, work: Callable[[str], str], names: Iterable[str]) -> Iterator[str]:
        """The results of `work` for each name, in order; several are worked on at a time.

        The error of a name is raised in its turn, and what was not begun by then never is.
        """
        # What fills the weights' memory by now comes before what other streams do with it.
        self._synchronize()
        pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "weights", self._set_up)
        try:
            yield from pool.map(work, names)
        finally:
            pool.shutdown(cancel_futures=True)
            self._synchronize()
            if self._is_cuda:
                # Tensors on their way lay in memory of those streams.
                torch.cuda.empty_cache()

    def __call__(self, source: Tensor) -> Tensor:
        """The tensor on the GPU; `source` is not needed any more when this returns."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        read = source.reshape(-1).view(torch.uint8).numpy()
        written, room = target.view(-1).view(torch.uint8), self._own.room
        for first in range(0, len(read), self._piece_bytes):
            piece = read[first : first + self._piece_bytes]
            # Unlike torch's own copy this takes no other threads.
            np.copyto(room.numpy()[: len(piece)], piece)
            written[first : first + len(piece)].copy_(room[: len(piece)], non_blocking=True)
            if self._is_cuda:
                torch.cuda.current_stream(self._device).synchronize()
        return target

    def _set_up(self) -> None:
        """Of one thread: its pinned memory and its stream."""
        size = self._piece_bytes
        self._own.room = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)
        if self._is_cuda:
            torch.cuda.set_stream(torch.cuda.Stream(self._device))

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
