"""Anthropic's client and OpenAI's Responses against a real server."""

from typing import Any

HI: list[Any] = [{"role": "user", "content": "Hello there"}]
GREEDY = {"extra_body": {"temperature": 0}}


def test_api_98_a_message_streamed_and_whole(server):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "random", "messages": HI, "max_tokens": 24} | GREEDY
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
        assert text == "".join(b.text for b in whole.content if b.type == "text")
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 24)
        count = client.messages.count_tokens(model="random", messages=HI)
        assert count.input_tokens == whole.usage.input_tokens
        assert whole._request_id and whole.id == f"msg_{whole._request_id}"
    server.wait_idle()


def test_a_thinking_budget_ends_the_thoughts(client):
    def thoughts(**fields: Any) -> int:
        answer = client.chat.completions.create(
            model="random",
            messages=HI,
            max_tokens=30,
            seed=3,
            extra_body={"thinking": True} | fields,
        )
        return answer.usage.completion_tokens_details.reasoning_tokens

    assert thoughts(ignore_eos=True) > 6
    assert thoughts(ignore_eos=True, thinking_token_budget=5) == 6
    assert thoughts(ignore_eos=True, thinking_token_budget=1, temperature=0) == 2


def test_api_100_a_response_streamed_whole_and_continued(client):
    fields: dict[str, Any] = {"model": "random", "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(input="Hello there", **fields)
    with client.responses.stream(input="Hello there", **fields) as stream:
        events = list(stream)
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.status == "incomplete" and whole.usage.output_tokens == 24
    answer = client.responses.create(input="And?", previous_response_id=whole.id, **fields)
    again = client.responses.create(
        input=[
            {"role": "user", "content": "Hello there"},
            *(item.model_dump(exclude_none=True) for item in whole.output),
            {"role": "user", "content": "And?"},
        ],
        **fields,
    )
    assert answer.output_text == again.output_text
    assert answer.usage.input_tokens > whole.usage.input_tokens
