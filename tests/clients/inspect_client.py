"""inspect-ai: an evaluation of one sample ends without an error."""

# pyright: reportMissingImports=false

import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

os.environ["LOCAL_BASE_URL"] = f"{sys.argv[1]}/v1"
os.environ["LOCAL_API_KEY"] = "EMPTY"
samples = [Sample(input="What is the capital of Norway?", target="Oslo")]
(log,) = eval(
    Task(dataset=samples, scorer=includes()),
    model="openai-api/local/tiny-dsa",
    temperature=0,
    display="none",
    log_dir=os.path.join(os.environ.get("TMPDIR", "/tmp"), "inspect-logs"),
)
assert log.status == "success", log.error
