"""Runs public clients, unchanged, each in its own virtual environment, against a served tiny-dsa.

`make clients` runs them all; `make clients ARGS="litellm llm"` some. A client is a script of this
folder that gets the server's address and the checkpoint's folder, and fails by an exception.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CHECKPOINT = ROOT / "checkpoints" / "tiny-dsa"
SECONDS = 600


@dataclass(frozen=True)
class Client:
    """What a script needs.

    packages come with all that they ask for, `alone` without: bench clients that come with an
    engine ask for its GPU libraries. Those borrow torch and transformers of this environment.
    wants_torch: the packages ask for torch, which is this environment's: its default build brings
    gigabytes of CUDA.
    """

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    wants_torch: bool = False


# Environments are separate: some of these pin versions that clash.
CLIENTS = {
    "openai_client": Client(("openai",)),
    "anthropic_client": Client(("anthropic",)),
    "litellm_client": Client(("litellm",)),
    "langchain_client": Client(("langchain-openai",)),
    "openai_agents_client": Client(("openai-agents",)),
    "llm_client": Client(("llm",)),
    "lm_eval_client": Client(("lm-eval[api]", "transformers")),
    "inspect_client": Client(("inspect-ai", "openai")),
    "schemathesis_client": Client(("schemathesis",)),
    "guidellm_client": Client(("guidellm",), wants_torch=True),
    "aiperf_client": Client(("aiperf",)),
    "vllm_bench_client": Client(
        packages=(
            *("aiohttp", "pybase64", "pillow", "psutil", "cachetools", "cbor2", "cloudpickle"),
            "py-cpuinfo",
        ),
        alone=("vllm", "xgrammar", "apache-tvm-ffi"),
    ),
    "sglang_bench_client": Client(
        packages=(
            *("aiohttp", "orjson", "msgspec", "psutil", "pybase64", "pillow", "pyzmq", "requests"),
            *("datasets", "huggingface-hub<2"),
        ),
        alone=("sglang",),
    ),
}


def main() -> int:
    """Run the named clients; returns 1 if any failed."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]
    from server_process import ServerProcess  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "clients")
    arguments = parser.parse_args()
    names = arguments.clients or list(CLIENTS)
    server = ServerProcess(str(CHECKPOINT), "--port", "0", "--num-threads", "1")
    try:
        results = {name: run(name, arguments.environments / name, server.url) for name in names}
    finally:
        server.kill()
    for name, result in results.items():
        print(f"{name:24} {result}")
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


def run(name: str, environment: Path, url: str) -> str:
    """How one client fared, in a few words; what it printed is shown where it failed."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    client = CLIENTS[name]
    if client.wants_torch:
        link_torch(environment)
    if not install(python, client.packages) or not install(python, client.alone, "--no-deps"):
        return "not installed"
    if client.alone:
        borrow_torch(environment)
    start = time.monotonic()
    command = [str(python), str(HERE / f"{name}.py"), url, str(CHECKPOINT)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"failed: not done within {SECONDS} s"
    if done.returncode:
        print(f"--- {name}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return "failed"
    return f"passed in {time.monotonic() - start:.0f} s"


def install(python: Path, packages: Sequence[str], *options: str) -> bool:
    """Whether the packages are there now."""
    command = [str(python), "-m", "pip", "install", "-q", *options, *packages]
    return not packages or subprocess.run(command, check=False).returncode == 0


def borrow_torch(environment: Path) -> None:
    """Let an environment import what stands beside this one's torch, behind its own packages."""
    (packages_of(environment) / "borrowed.pth").write_text(f"{torch_home()}\n")


def link_torch(environment: Path) -> None:
    """Put this environment's torch, and nothing else of it, among another one's packages."""
    packages = packages_of(environment)
    for pattern in ("torch", "torch-*.dist-info", "torchgen", "functorch"):
        for source in torch_home().glob(pattern):
            target = packages / source.name
            if not target.exists():
                target.symlink_to(source)


def packages_of(environment: Path) -> Path:
    """Where an environment keeps its packages."""
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def torch_home() -> Path:
    """The folder that this environment's torch was installed into."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent.parent


if __name__ == "__main__":
    sys.exit(main())
