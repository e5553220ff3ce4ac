"""Progress bars of a start, for whoever watches."""

import threading
from typing import Any

from tqdm import tqdm


def progress_bar(what: str, **options: Any) -> tqdm:
    """A bar of tqdm, with its options; none where nobody watches."""
    # Its default lock is a system-wide semaphore, which a killed engine would leave behind.
    tqdm.set_lock(threading.RLock())
    return tqdm(desc=what, disable=None, **options)
