"""aiperf loads the server with streams of a chat, and reads /metrics; no request may fail."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, checkpoint = sys.argv[1:3]
COUNT = 6
with tempfile.TemporaryDirectory() as folder:
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "-m", "tiny-dsa"]
    command += ["--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", checkpoint]
    command += ["--concurrency", "2", "--request-count", str(COUNT), "--isl", "32", "--osl", "8"]
    command += ["--ui", "none"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"NO_PROXY": "*"}
    )
    print(done.stdout[-3000:], done.stderr[-3000:])
    assert done.returncode == 0, done.returncode
    (export,) = Path(folder).rglob("profile_export_aiperf.json")
    result = json.loads(export.read_text())
    assert result["request_count"]["avg"] == COUNT, result["request_count"]
    assert not result["error_summary"] and not result["was_cancelled"], result["error_summary"]
    (scraped,) = Path(folder).rglob("server_metrics_export.csv")
    assert "minidsa:generation_tokens" in scraped.read_text()
