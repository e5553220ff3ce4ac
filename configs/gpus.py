"""GPUs by name, for plans made where there is none."""

from dataclasses import dataclass

from .setting_error import SettingError

# What CUDA and the libraries take for themselves, about.
CONTEXT_BYTES = 600 << 20


@dataclass(frozen=True)
class Gpu:
    """total_bytes: as the driver reports it. has_fp8: its tensor cores multiply fp8."""

    name: str
    total_bytes: int
    has_fp8: bool = True

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - CONTEXT_BYTES


GPUS = (
    Gpu("b200", 183359 << 20),
    Gpu("h200", 143771 << 20),
    Gpu("a100", 81920 << 20, has_fp8=False),
    Gpu("h100", 81559 << 20),
    Gpu("l40s", 46068 << 20),
    Gpu("rtx4090", 24564 << 20),
)


def find_gpu(name: str) -> Gpu:
    """A GPU by its name; raises SettingError that lists those there are."""
    found = next((gpu for gpu in GPUS if gpu.name == name.lower()), None)
    if found is None:
        names = ", ".join(gpu.name for gpu in GPUS)
        raise SettingError(f"--gpu {name} is not known; there are: {names}")
    return found
