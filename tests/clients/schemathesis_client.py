"""schemathesis over the OpenAPI document: whatever is sent, the server does not fail."""

import subprocess
import sys
from pathlib import Path

command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
options = [
    "--checks",
    "not_a_server_error",
    "--max-examples",
    "20",
    "--request-timeout",
    "120",
    "--phases",
    "examples,fuzzing",
]
done = subprocess.run([*command, f"{sys.argv[1]}/openapi.json", *options])
sys.exit(done.returncode)
