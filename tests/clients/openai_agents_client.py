"""openai-agents over chat completions and over Responses: a tool is called, then the run ends."""

# pyright: reportMissingImports=false

import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

called: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    called.append(city)
    return json.dumps({"city": city, "weather": "sunny", "temperature": 12})


set_tracing_disabled(True)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    # A client for each run: it belongs to the event loop that the run makes.
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="EMPTY")
    model = kind(model="tiny-dsa", openai_client=client)
    settings = ModelSettings(temperature=0)
    agent = Agent(name="a", model=model, tools=[get_weather], model_settings=settings)
    result = Runner.run_sync(agent, "What is the weather in Oslo?")
    assert called == ["Oslo"] and "sunny" in result.final_output, (called, result)
    called.clear()
