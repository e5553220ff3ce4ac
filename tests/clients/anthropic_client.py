"""The official Anthropic client: a message whole and streamed, a tool, counting, errors."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="x", max_retries=0)
messages = [{"role": "user", "content": "What is the capital of Norway?"}]
fields = {"model": "tiny-dsa", "max_tokens": 50, "messages": messages}
fields["extra_body"] = {"temperature": 0}
answer = client.messages.create(**fields)
assert "Oslo" in answer.content[0].text and answer.stop_reason == "end_turn", answer
with client.messages.stream(**fields) as stream:
    assert "".join(stream.text_stream) == answer.content[0].text
count = client.messages.count_tokens(model="tiny-dsa", messages=messages)
assert count.input_tokens == answer.usage.input_tokens
weather = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
fields |= {"tools": [weather], "max_tokens": 100}
fields["messages"] = [{"role": "user", "content": "What is the weather in Oslo?"}]
with client.messages.stream(**fields) as stream:
    turn = stream.get_final_message()
(call,) = (block for block in turn.content if block.type == "tool_use")
assert turn.stop_reason == "tool_use" and call.input == {"city": "Oslo"}, turn
found = '{"city": "Oslo", "weather": "sunny", "temperature": 12}'
result = {"type": "tool_result", "tool_use_id": call.id, "content": found}
fields["messages"] += [
    {"role": "assistant", "content": turn.content},
    {"role": "user", "content": [result]},
]
assert "sunny" in client.messages.create(**fields).content[0].text
try:
    client.messages.create(model="tiny-dsa", max_tokens=0, messages=messages)
    raise AssertionError("max_tokens 0 was taken")
except anthropic.BadRequestError as error:
    assert "max_tokens" in str(error)
