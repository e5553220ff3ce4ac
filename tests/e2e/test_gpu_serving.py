"""The real server on a GPU, with drafts: both backends, both formats of rows.

pytest -m gpu tests/e2e/test_gpu_serving.py
"""

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

from checkpoints import T_V32, t_v32

pytestmark = pytest.mark.gpu

TINY_DSA = Path(__file__).parents[2] / "checkpoints" / "tiny-dsa"
PROMPT = "Tell me about the sea. " * 20


# Prompts of a model with V3.2's shapes: within its selection of 512 keys, and well past it.
LENGTHS = (41, 502, 703, 1501)
STEPS = 48
# Two backends round bfloat16 in different orders; further apart than this they may not differ.
NOISE = 0.25


def served(checkpoint: Path, flags: tuple[str, ...]) -> ServerProcess:
    return ServerProcess(
        *(str(checkpoint), "--port", "0", "--device", "cuda", "--dtype", "bfloat16"),
        *("--set", "engine.cache.num_pages=200", *flags),
    )


def answers(*flags: str) -> tuple[list[str], list[str]]:
    """What a server with these flags says to two chats, in one piece and streamed."""
    server = served(TINY_DSA, flags)
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


def greedy_tokens(*flags: str) -> list[dict[str, Any]]:
    """The ids and best scores of each token that follows each prompt."""
    server = served(t_v32(), flags)
    draw = random.Random(0)
    vocabulary = range(2, int(T_V32["vocab_size"]))
    prompts = [draw.choices(vocabulary, k=length) for length in LENGTHS]
    body = {
        "model": t_v32().name,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": STEPS,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
    }
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]
    finally:
        server.kill()


@pytest.mark.parametrize("rows", ["auto", "fp8"])
def test_a_model_of_v32_shapes_says_over_kernels_what_it_says_over_torch(rows):
    """Equal ids up to the first token whose best two are closer than rounding."""
    own, leading = (
        greedy_tokens("--attention-backend", name, "--kv-cache-dtype", rows)
        for name in ("triton", "torch")
    )
    met = 0
    for said, expected in zip(own, leading, strict=True):
        pairs = zip(said["token_ids"], expected["token_ids"], strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), STEPS)
        met += first
        if first < STEPS:
            best, second = sorted(expected["logprobs"]["top_logprobs"][first].values())[:-3:-1]
            assert best - second < NOISE, (first, best, second)
    assert met >= len(LENGTHS) * STEPS // 4
