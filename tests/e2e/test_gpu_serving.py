"""tiny-dsa behind the real server on a GPU, with drafts: both backends, both formats of rows.

pytest -m gpu tests/e2e/test_gpu_serving.py
"""

from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.gpu

TINY_DSA = Path(__file__).parents[2] / "checkpoints" / "tiny-dsa"
PROMPT = "Tell me about the sea. " * 20


def answers(*flags: str) -> tuple[list[str], list[str]]:
    """What a server with these flags says to two chats, in one piece and streamed."""
    server = ServerProcess(
        *(str(TINY_DSA), "--port", "0", "--device", "cuda", "--dtype", "bfloat16"),
        *("--set", "engine.cache.num_pages=200", *flags),
    )
    try:
        whole, streamed = [], []
        for content in ("Hello!", PROMPT):
            body = {
                "model": "tiny-dsa",
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": 60,
            }
            url = f"{server.url}/v1/chat/completions"
            answer = httpx.post(url, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            whole.append(answer.json()["choices"][0]["message"]["content"])
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
                streamed.append("".join(stream.iter_text()))
        return whole, streamed
    finally:
        server.kill()


@pytest.mark.parametrize("rows", ["auto", "fp8"])
def test_a_chat_over_kernels_reads_as_over_torch(rows):
    said = [
        answers("--attention-backend", name, "--kv-cache-dtype", rows)
        for name in ("torch", "triton")
    ]
    for whole, streamed in said:
        assert all(whole)
        assert all("[DONE]" in text for text in streamed)
    assert said[0][0][0] == said[1][0][0]
