"""The official client against a real server: what a user does on the first day."""

import asyncio
import math
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

HI = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0, "max_tokens": 24}


def test_models(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "random"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_api_35_a_chat_streamed_and_whole(client):
    for settings in (GREEDY, {"seed": 7, "max_tokens": 24}):
        answer = client.chat.completions.create(model="random", messages=HI, **settings)
        chunks = list(
            client.chat.completions.create(
                model="random",
                messages=HI,
                stream=True,
                stream_options={"include_usage": True},
                **settings,
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage == answer.usage
        assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == 24
        assert answer._request_id and answer.id.endswith(answer._request_id)


def test_api_06_an_exact_length(client):
    answer = client.completions.create(
        model="random", prompt="one two", max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def extra(item: BaseModel) -> dict[str, Any]:
    """Fields beside OpenAI's own."""
    return item.model_extra or {}


def ids_of(client, prompt, **fields) -> list[list[int]]:
    body = fields.pop("body", {}) | {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model="random", prompt=prompt, max_tokens=20, extra_body=body, **fields
    )
    return [extra(choice)["token_ids"] for choice in answer.choices]


async def test_api_08_greedy_alone_and_among_others(client, server):
    (alone,) = ids_of(client, "alone or not", temperature=0)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as others:

        async def ask(prompt: str, temperature: float):
            answer = await others.completions.create(
                model="random",
                prompt=prompt,
                temperature=temperature,
                max_tokens=20,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            return extra(answer.choices[0])["token_ids"]

        prompts = [("alone or not", 0.0), *((f"mate {i} " * i, 1.0) for i in range(1, 12))]
        found = await asyncio.gather(*(ask(*prompt) for prompt in prompts))
    assert found[0] == alone


def test_api_21_three_ways_to_say_greedy(client):
    greedy = ids_of(client, "greedy", temperature=0)
    assert ids_of(client, "greedy", temperature=1, body={"top_k": 1}) == greedy
    assert ids_of(client, "greedy", temperature=1, top_p=1e-6) == greedy
    assert ids_of(client, "greedy", temperature=1, body={"min_p": 1}) == greedy


def test_http_20_choices_of_a_seed(client):
    first = ids_of(client, ["x", "y"], n=4, seed=3)
    assert first == ids_of(client, ["x", "y"], n=4, seed=3)
    assert len({tuple(ids) for ids in first}) == 8
    assert ids_of(client, "x", seed=3)[0] == first[0]
    equal = ids_of(client, "x", n=3, temperature=0)
    assert equal[0] == equal[1] == equal[2]


def test_api_11_text_and_ids(client, server):
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "some text"}).json()["tokens"]
    assert ids_of(client, "some text", temperature=0) == ids_of(client, tokens, temperature=0)


def test_api_14_scores_of_a_prompt_agree_with_generation(client):
    answer = client.completions.create(
        model="random",
        prompt="score me",
        max_tokens=6,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = answer.choices[0]
    prompt = extra(choice)["prompt_token_ids"]
    ids = extra(choice)["token_ids"]
    scored = client.completions.create(
        model="random", prompt=prompt + ids, max_tokens=0, echo=True, logprobs=2
    ).choices[0]
    values = scored.logprobs.token_logprobs
    assert len(values) == len(prompt) + len(ids) and values[0] is None
    for found, expected in zip(values[len(prompt) :], choice.logprobs.token_logprobs, strict=True):
        assert math.isclose(found, expected, abs_tol=1e-4)


def test_api_16_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="random", messages=HI, max_tokens=8, logprobs=True, top_logprobs=5, temperature=0
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0])
        assert sum(math.exp(value) for value in values) < 1


def test_api_18_a_bias_forces_and_forbids(client):
    forced = ids_of(client, "bias", temperature=0, logit_bias={"300": 100})
    assert set(forced[0]) == {300}
    answer = client.completions.create(
        model="random", prompt="bias", max_tokens=30, logit_bias={"1": -100}
    )
    assert answer.choices[0].finish_reason == "length"


def test_api_34_stop_ids_and_strings(client):
    (ids,) = ids_of(client, "stop here", temperature=0)
    end = next(i for i in range(1, 20) if ids[i] not in ids[:i])
    answer = client.completions.create(
        model="random",
        prompt="stop here",
        max_tokens=20,
        temperature=0,
        extra_body={"stop_token_ids": [ids[end]], "return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and extra(choice)["stop_reason"] == ids[end]
    assert extra(choice)["token_ids"] == ids[: end + 1]


def test_http_16_every_field_is_obeyed(client):
    def run(**fields):
        settings = {"max_tokens": 40, "temperature": 0} | fields
        return client.chat.completions.create(model="random", messages=HI, **settings)

    plain = run()
    text = plain.choices[0].message.content or ""
    assert plain.object == "chat.completion"
    assert run(max_tokens=1).choices[0].finish_reason == "length"
    stop = text[len(text) // 2 :][:2]
    stopped = run(stop=stop).choices[0]
    assert stopped.message.content == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(run(n=2).choices) == 2
    for penalties in (
        {"presence_penalty": 2, "frequency_penalty": 2},
        {"extra_body": {"repetition_penalty": 1.8}},
    ):
        assert run(**penalties).choices[0].message.content != text


def test_api_47_a_prompt_beyond_the_context(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="random", prompt=[300] * 600)
    assert "This model's maximum context length is 512 tokens" in str(caught.value)
    assert "600 tokens" in str(caught.value)
    assert caught.value.code == "context_length_exceeded"
    exact = client.completions.create(model="random", prompt=[300] * 500, max_tokens=12)
    assert exact.usage.total_tokens == 512
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="random", prompt=[300] * 500, max_tokens=13)


def test_mistakes_reach_the_user_with_their_field(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="random", messages=HI, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="random", messages=HI, extra_body={"regex": "(a"}, stream=True
        )
    assert (caught.value.param, caught.value.code) == ("regex", "invalid_schema")


def test_thinking_and_tools_are_accepted(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    short = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="random", messages=short, tools=tools, n=1)
    answer = client.chat.completions.create(
        model="random",
        messages=short,
        max_tokens=4,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == answer.usage.completion_tokens == 4


async def read(client: httpx.AsyncClient, request: httpx.Request) -> None:
    response = await client.send(request, stream=True)
    try:
        async for _ in response.aiter_bytes():
            pass
    finally:
        await response.aclose()


async def test_api_43_fifty_disconnects_leave_no_page_behind(server):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def leave(index: int) -> None:
            body = {"prompt": f"leaving {index}", "max_tokens": 400, "ignore_eos": True}
            body["stream"] = index % 2 == 0
            request = client.build_request("POST", "/v1/completions", json=body)
            reading = asyncio.create_task(read(client, request))
            await asyncio.sleep(0.02 + 0.01 * (index % 20))
            assert not reading.done()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        await asyncio.gather(*(leave(index) for index in range(50)))
    server.wait_idle()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "still there"}, timeout=60)
    assert answer.status_code == 200


async def test_sch_23_an_answer_that_nobody_waits_for_is_not_generated(server):
    """Not streamed: the first bytes of such an answer are sent when it is whole."""
    before = server.metric("generation_tokens_total")
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"prompt": "going", "max_tokens": 480, "ignore_eos": True}
        request = client.build_request("POST", "/v1/completions", json=body)
        reading = asyncio.create_task(read(client, request))
        while server.metric("num_requests_running") == 0:
            assert not reading.done()
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    server.wait_idle()
    assert server.metric("generation_tokens_total") - before < 480


def test_queued_requests_are_served_in_turn(server, client):
    """More requests than seats, and more tokens than pages: preempted or queued, never lost."""

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"prompt": [300] * 100, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body) for _ in range(40))
            )
            assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
            return [answer.json()["usage"]["completion_tokens"] for answer in answers]

    assert asyncio.run(run()) == [60] * 40


def test_health_metrics_and_info(server):
    assert httpx.get(f"{server.url}/health").content == b""
    assert httpx.head(f"{server.url}/metrics").status_code == 200
    assert server.metric("generation_tokens_total") > 0
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["engine"]["model_type"] == "deepseek_v32"
    assert info["longest_request"] == 512
