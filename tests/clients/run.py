"""Runs public clients, unchanged, each in its own virtual environment, against a served tiny-dsa.

`make clients` runs them all; `make clients ARGS="litellm llm"` some. A client is a script of this
folder that gets the server's address and the checkpoint's folder, and fails by an exception.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CHECKPOINT = ROOT / "checkpoints" / "tiny-dsa"
SECONDS = 600

# What each script needs. Environments are separate: some of these pin versions that clash.
CLIENTS = {
    "openai_client": ["openai"],
    "anthropic_client": ["anthropic"],
    "litellm_client": ["litellm"],
    "langchain_client": ["langchain-openai"],
    "openai_agents_client": ["openai-agents"],
    "llm_client": ["llm"],
    "lm_eval_client": ["lm-eval[api]", "transformers"],
    "inspect_client": ["inspect-ai", "openai"],
    "schemathesis_client": ["schemathesis"],
    "guidellm_client": ["guidellm"],
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
    install = [str(python), "-m", "pip", "install", "-q", *CLIENTS[name]]
    if subprocess.run(install, check=False).returncode:
        return "not installed"
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


if __name__ == "__main__":
    sys.exit(main())
