"""langchain-openai: invoke, stream, tools that are called or not, three ways to a structure."""

# pyright: reportMissingImports=false

import sys

import pydantic
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


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return f"It is sunny in {city}."


(call,) = chat.bind_tools([get_weather]).invoke("What is the weather in Oslo?").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"}), call


class Town(pydantic.BaseModel):
    """A town"""

    name: str = pydantic.Field(max_length=12)
    people: int = pydantic.Field(ge=0, le=999)


for method in ("json_schema", "function_calling"):
    town = chat.with_structured_output(Town, method=method).invoke("Tell me about a town")
    assert isinstance(town, Town), (method, town)
as_json = chat.with_structured_output(None, method="json_mode")
assert as_json.invoke("Write a JSON object with name Emil, age 31, city Lyon")["name"] == "Emil"
