"""What this machine offers: cores and memory, asked of the system itself.

Only facts that need no tensor library; what a GPU offers is for the model's side to ask.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """free_bytes: main memory that can be had without pushing anything out."""

    has_cuda: bool
    num_cores: int
    free_bytes: int


def detect(has_cuda: bool, root: Path = Path("/")) -> Machine:
    """Look at this machine; `root` is where /proc and /sys are found."""
    return Machine(
        has_cuda=has_cuda,
        num_cores=_num_cores(root),
        free_bytes=free_bytes(root),
    )


def free_bytes(root: Path = Path("/")) -> int:
    """Main memory that is free or can be reclaimed, within the limit of the container."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    used = _read(root / "sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(int(limit) - int(used), 0))
    return free


def _num_cores(root: Path) -> int:
    """Cores this process may run on, rounded up to whole ones where a container has a share."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(-(-int(quota) // int(period)), 1))
    return cores


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
