"""litellm by three of its providers: answers, streams, and its name for too long a prompt."""

# pyright: reportMissingImports=false

import sys

import litellm

url = f"{sys.argv[1]}/v1"
messages = [{"role": "user", "content": "What is the capital of Norway?"}]
for provider in ("openai", "hosted_vllm", "deepseek"):
    fields = {"model": f"{provider}/tiny-dsa", "api_base": url, "api_key": "EMPTY"}
    answer = litellm.completion(messages=messages, temperature=0, **fields)
    text = answer.choices[0].message.content
    assert "Oslo" in text and answer.usage.prompt_tokens > 0, text
    parts = litellm.completion(messages=messages, temperature=0, stream=True, **fields)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    try:
        litellm.completion(messages=[{"role": "user", "content": "x " * 20_000}], **fields)
        raise AssertionError("too long a prompt was taken")
    except litellm.ContextWindowExceededError:
        pass
