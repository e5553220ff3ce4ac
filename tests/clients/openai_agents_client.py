"""openai-agents over chat completions and over Responses: a run ends with its final text."""

# pyright: reportMissingImports=false

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    # A client for each run: it belongs to the event loop that the run makes.
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="EMPTY")
    model = kind(model="tiny-dsa", openai_client=client)
    agent = Agent(name="a", model=model, model_settings=ModelSettings(temperature=0))
    result = Runner.run_sync(agent, "What is the capital of Norway?")
    assert "Oslo" in result.final_output, result
