"""The llm command line with this server among its OpenAI models."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: mini\n  model_name: tiny-dsa\n  api_base: {sys.argv[1]}/v1\n"
    )
    command = [str(Path(sys.executable).with_name("llm")), "-m", "mini", "--key", "EMPTY"]
    question = ["-o", "temperature", "0", "What is the capital of Norway?"]
    environment = os.environ | {"LLM_USER_PATH": folder}
    for extra in ([], ["--no-stream"]):
        done = subprocess.run(
            [*command, *extra, *question], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0 and "Oslo" in done.stdout, done
