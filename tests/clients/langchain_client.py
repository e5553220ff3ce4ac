"""langchain-openai: invoke, stream, tools bound and left to the model."""

# pyright: reportMissingImports=false

import sys

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="EMPTY", model="tiny-dsa", temperature=0)
answer = chat.invoke("What is the capital of Norway?")
assert "Oslo" in answer.content and answer.usage_metadata["total_tokens"] > 0, answer
streamed = "".join(part.content for part in chat.stream("What is the capital of Norway?"))
assert streamed == answer.content


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


bound = chat.bind_tools([add], parallel_tool_calls=False)
assert bound.invoke("What is the capital of Norway?").response_metadata["finish_reason"]
