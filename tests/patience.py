"""How long tests wait for what must happen: a limit against hangs, never a promise of speed."""

import asyncio
import time
from collections.abc import Callable

PATIENCE = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Wait, inside the event loop, until `condition()` is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.002)
