"""lm-eval on a task of its own: likelihoods over completions, answers over chat."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = """
task: capitals_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
"""
CHOICES = 'doc_to_choice: ["Oslo", "Rome"]\nmetric_list: [{metric: acc}]'
UNTIL = (
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 20}\nmetric_list: [{metric: exact_match}]'
)

url, checkpoint = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "capitals.jsonl")
    rows = [{"question": "The capital of Norway is", "answer": "Oslo", "index": 0}] * 3
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = (
        ("multiple_choice", "{{index}}", CHOICES, "local-completions", "completions"),
        ("generate_until", "{{answer}}", UNTIL, "local-chat-completions", "chat/completions"),
    )
    for kind, target, more, model, path in kinds:
        text = TASK.format(kind=kind, data=data, target=target, more=more)
        Path(folder, f"{kind}.yaml").write_text(text)
        command = [
            *(str(Path(sys.executable).with_name("lm_eval")), "run", "--model", model),
            "--model_args",
            f"model=tiny-dsa,base_url={url}/v1/{path},tokenizer={checkpoint},num_concurrent=2,"
            "tokenizer_backend=huggingface",
            *("--tasks", f"capitals_{kind}", "--include_path", folder, "--batch_size", "1"),
        ]
        if "chat" in model:
            command.append("--apply_chat_template")
        environment = os.environ | {"OPENAI_API_KEY": "EMPTY", "HF_HOME": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        print(done.stdout)
