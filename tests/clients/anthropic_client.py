"""The official Anthropic client: a message whole and streamed, counting, errors."""

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
try:
    client.messages.create(model="tiny-dsa", max_tokens=0, messages=messages)
    raise AssertionError("max_tokens 0 was taken")
except anthropic.BadRequestError as error:
    assert "max_tokens" in str(error)
