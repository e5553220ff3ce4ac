"""What `benchmarks.kernels` times: cases, the kernels that do them, and their floors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.peers import Peers

# One H200, as measured: copying (bytes read and written), and the datasheet's dense rates.
BYTES_PER_US = 4.28e6
FLOP_PER_US = {"bf16": 989e6, "fp8": 1979e6}


def floor_us(bytes_moved: float, flop: float = 0.0, kind: str = "bf16") -> float:
    """The time that no kernel can be much faster than."""
    return max(bytes_moved / BYTES_PER_US, flop / FLOP_PER_US[kind])


@dataclass
class Entry:
    """One kernel that does a case: `check` runs it anew and says "ok ..." or "wrong ..."."""

    name: str
    run: Callable[[], object]
    check: Callable[[], str]
    cold_us: list[float] = field(default_factory=list)
    warm_us: list[float] = field(default_factory=list)


@dataclass
class Case:
    """The same work for every entry; entries named minidsa... are ours."""

    kernel: str
    shape: str
    floor_us: float
    entries: list[Entry]


# A section makes its cases one after the other, so that only one case's tensors exist at a time.
# It gets the peers and whether only the cases with goals are wanted.
Section = Callable[[Peers, bool], Iterable[Case]]


def closeness(out: Tensor, expected: Tensor, tolerance: float) -> str:
    """ "ok" or "wrong" with the relative error |out - expected| / |expected|; NaN is wrong."""
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    return f"{'ok' if error < tolerance else 'wrong'} {error:.1e}"


def worst(checks: Iterable[str]) -> str:
    """The first wrong one, or the last."""
    checks = list(checks)
    return next((check for check in checks if check.startswith("wrong")), checks[-1])
