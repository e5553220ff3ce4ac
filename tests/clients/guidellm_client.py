"""guidellm loads the server with a few requests one after the other; none of them may fail."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, checkpoint = sys.argv[1:3]
with tempfile.TemporaryDirectory() as folder:
    command = [str(Path(sys.executable).with_name("guidellm")), "run"]
    command += ["--backend", f"kind=openai_http,target={url},model=tiny-dsa"]
    command += ["--profile", "kind=synchronous"]
    command += ["--constraint", "kind=max_requests,count=3"]
    command += ["--tokenizer", f"kind=hf_auto,model={checkpoint}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"NO_PROXY": "*"}
    )
    print(done.stdout[-3000:], done.stderr[-3000:])
    assert done.returncode == 0, done.returncode
    (benchmark,) = json.loads(Path(folder, "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    # Its own statistics leave a request at the edge of the run out.
    assert totals["successful"] >= 2, totals
    assert totals["errored"] == totals["incomplete"] == 0, totals
