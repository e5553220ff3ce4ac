"""The official OpenAI client: models, chat, tools, completions, Responses, errors."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import sys

import openai
import pydantic

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="EMPTY", max_retries=0)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model
messages = [{"role": "user", "content": "What is the capital of Norway?"}]
answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
text = answer.choices[0].message.content
assert "Oslo" in text and answer.usage.total_tokens > 0, text
with client.chat.completions.stream(model=model, messages=messages, temperature=0) as stream:
    stream.until_done()
    assert stream.get_final_completion().choices[0].message.content == text
raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, n=2, seed=1)
assert raw.headers["x-request-id"] and len(raw.parse().choices) == 2
whole = client.completions.create(model=model, prompt="Once", max_tokens=5, logprobs=2, echo=True)
assert whole.choices[0].text.startswith("Once") and whole.choices[0].logprobs.token_logprobs


class Town(pydantic.BaseModel):
    """What the client makes a strict schema of."""

    name: str = pydantic.Field(max_length=12)
    people: int = pydantic.Field(ge=0, le=999)


asked = [{"role": "user", "content": "Write a JSON object about a town"}]
parsed = client.chat.completions.parse(model=model, messages=asked, seed=5, response_format=Town)
assert isinstance(parsed.choices[0].message.parsed, Town), parsed
response = client.responses.create(model=model, input=messages, temperature=0)
assert response.output_text == text
with client.responses.stream(model=model, input=messages, temperature=0) as events:
    assert events.get_final_response().output_text == text
try:
    client.chat.completions.create(model=model, messages=messages, temperature=9)
    raise AssertionError("a temperature of 9 was taken")
except openai.BadRequestError as error:
    assert error.param == "temperature"
