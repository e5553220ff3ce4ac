"""What the attention kernels take of a Hopper GPU, from the compiler alone: no GPU is needed.

    python -m benchmarks.kernel_resources [--output FILE]

Compiles the latent attention kernels for sm_90 at DeepSeek-V3.2's shapes, as they would be launched
for 128, 32 and 16 heads, and prints registers and stack bytes of a thread (a stack means spilled
registers), shared memory of a program (at most 232,448 bytes), and how many instructions of some
kinds there are: HGMMA and HMMA multiply matrices with whole warp groups and with single warps,
LDGSTS load into shared memory in the background.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when kernels are defined, hence before their import

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from minidsa.attention.kernels import mla_decode, mla_prefill, sparse_mla

LATENT, ROPE, PAGE = 512, 64, 64
HOPPER = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KINDS = ("HGMMA", "HMMA", "LDGSTS")


class HopperWithoutDevice:
    """Stands in for triton's driver: says for what to compile, and can launch nothing."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """The kernels that a block of code would have launched, by name."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}

    def __enter__(self) -> "Compiled":
        self.launch = JITFunction.__getitem__
        driver: Any = HopperWithoutDevice()
        triton.runtime.driver.set_active(driver)
        JITFunction.__getitem__ = self._compile_for
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.__getitem__ = self.launch

    @property
    def _compile_for(self) -> Callable[..., Any]:
        def getitem(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
            def compile_only(*args: Any, **options: Any) -> None:
                made = kernel.run(*args, grid=grid, warmup=True, **options)
                self.kernels[kernel.fn.__name__] = made

            return compile_only

        return getitem


def resources(kernel: Any) -> dict[str, int]:
    """Registers and stack of a thread, shared memory of a program, instructions by kind."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _dump("--dump-resource-usage", file.name)
        code = _dump("--dump-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage}")
    taken = {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": kernel.metadata.shared,
    }
    return taken | {kind: len(re.findall(rf"\b{kind}\b", code)) for kind in KINDS}


def _dump(option: str, path: str) -> str:
    command = [str(CUOBJDUMP), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rows_of(is_fp8: bool) -> Tensor:
    if is_fp8:
        return torch.zeros(PAGE, LATENT + LATENT // 32 + 2 * ROPE, dtype=torch.uint8)
    return torch.zeros(PAGE, LATENT + ROPE, dtype=torch.bfloat16)


def sparse(heads: int, is_fp8: bool, num_parts: int) -> None:
    q = torch.zeros(2, heads, LATENT + ROPE, dtype=torch.bfloat16)
    slots = torch.zeros(2, 2048, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    sparse_mla.sparse_mla(q, rows_of(is_fp8), slots, counts, LATENT, num_parts=num_parts)


def decode(heads: int, is_fp8: bool, num_parts: int) -> None:
    lengths = [3000] * (300 if num_parts == 1 else 2)
    q = torch.zeros(len(lengths), heads, LATENT + ROPE, dtype=torch.bfloat16)
    table = torch.zeros(len(lengths), 64, dtype=torch.int32)
    rows = rows_of(is_fp8)
    tiling = mla_decode.decode_tiling(heads, rows, LATENT)
    parts = mla_decode.DecodeParts.of(lengths, heads, tiling, q.device, MULTIPROCESSORS)
    mla_decode.mla_decode(q, rows, table, PAGE, parts, LATENT)


def prefill(width: int, v_width: int, rounds: int) -> None:
    heads, tokens = 4, 256
    q = torch.zeros(tokens, heads, width + ROPE, dtype=torch.bfloat16)
    keys = mla_prefill.ExpandedKeys(
        torch.zeros(heads, tokens, width, dtype=torch.bfloat16),
        torch.zeros(tokens, LATENT + ROPE, dtype=torch.bfloat16)[:, LATENT:],
        torch.zeros(heads, tokens, v_width, dtype=torch.bfloat16),
    )
    out = torch.zeros(
        tokens, heads, v_width, dtype=torch.bfloat16 if rounds == 1 else torch.float32
    )
    blocks = torch.zeros(2, 6, dtype=torch.int32)
    lse = torch.zeros(tokens, heads)
    mla_prefill.mla_prefill(q[..., :width], q[..., width:], keys, blocks, 0.1, out, lse)


def table() -> Iterator[dict[str, Any]]:
    """A row for each kernel, heads, format of the rows, and whether keys are cut into parts."""
    for name, run in (("sparse_mla", sparse), ("mla_decode", decode)):
        for heads in (128, 32, 16):
            for is_fp8 in (False, True):
                for num_parts in (1, 4):
                    with Compiled() as compiled:
                        run(heads, is_fp8, num_parts)
                    shape = f"{heads} heads, {'fp8' if is_fp8 else 'bf16'} rows"
                    shape += ", in parts" if num_parts > 1 else ""
                    kernel = next(k for n, k in compiled.kernels.items() if n != "_join_parts")
                    yield {"kernel": name, "shape": shape} | resources(kernel)
    for width, v_width in ((128, 128), (192, 256)):
        for rounds in (1, 2):
            with Compiled() as compiled:
                prefill(width, v_width, rounds)
            shape = f"keys of {width} + {ROPE}, values of {v_width}"
            shape += ", in rounds" if rounds > 1 else ""
            (kernel,) = compiled.kernels.values()
            yield {"kernel": "mla_prefill", "shape": shape} | resources(kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file for all rows")
    args = parser.parse_args()
    rows = []
    for row in table():
        rows.append(row)
        numbers = " ".join(f"{key} {value}" for key, value in list(row.items())[2:])
        print(f"{row['kernel']:12s} {row['shape']:40s} {numbers}", flush=True)
    if args.output:
        report = {"triton": triton.__version__, "target": "sm_90", "rows": rows}
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
