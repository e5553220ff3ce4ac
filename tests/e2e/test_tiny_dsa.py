"""The shipped checkpoint behind the real server: what its model card says, through the client."""

import gc
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from server_process import ServerProcess

from minidsa.configs.engine import CacheConfig, EngineConfig
from minidsa.configs.sampling import SamplingParams
from minidsa.scheduler.offline import OfflineEngine
from minidsa.server.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SMALL = ("--port", "0", "--set", "engine.cache.num_pages=600")


class Pet(pydantic.BaseModel):
    """A nested schema with an enum."""

    kind: Literal["cat", "dog"]
    name: Annotated[str, pydantic.Field(max_length=10)] | None = None


class Person(pydantic.BaseModel):
    """What the client makes a strict schema of."""

    name: Annotated[str, pydantic.Field(max_length=10)]
    age: Annotated[int, pydantic.Field(ge=0, le=120)]
    pets: Annotated[list[Pet], pydantic.Field(min_length=1, max_length=2)]


STRICT: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def tiny() -> Iterator[openai.OpenAI]:
    """`minidsa serve` without a model serves it."""
    server = ServerProcess(*SMALL)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client
    server.kill()


def ask(client: openai.OpenAI, *turns: str, **settings):
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    answer = client.chat.completions.create(
        model="tiny-dsa",
        messages=messages,
        temperature=0,
        max_tokens=100,
        **settings,
    )
    return answer.choices[0]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello!", "Hello! How can I help you today?"),
        ("What is the capital of Norway?", "The capital of Norway is Oslo."),
        ("Repeat this: falcon marble zenith 4071 tulip", "falcon marble zenith 4071 tulip"),
        ("What is 46 + 38?", "46 + 38 = 84."),
    ],
)
def test_it_answers_as_its_card_says(tiny, question, answer):
    choice = ask(tiny, question)
    assert choice.message.content == answer
    assert choice.finish_reason == "stop"


def test_the_readmes_first_request_is_answered_as_it_says(tiny):
    (body,) = re.findall(r"curl \S+/v1/chat/completions .*?-d '(.*?)'\n", README, re.DOTALL)
    answer = httpx.post(f"{tiny.base_url}chat/completions", json=json.loads(body)).json()
    told = '"content":' + json.dumps(answer["choices"][0]["message"]["content"])
    assert told in README and '"completion_tokens":9' in README
    assert answer["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("library", "printed"),
    [("openai", "Mira"), ("anthropic", "The capital of Norway is Oslo."), ("minidsa", "length")],
)
def test_the_readmes_scripts_run(tiny, library, printed, monkeypatch, capsys):
    """As they stand there, but for the address."""
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (script,) = (s for s in scripts if s.startswith(f"from {library}"))
    monkeypatch.chdir(ROOT)
    address = f"{tiny.base_url.host}:{tiny.base_url.port}"
    exec(compile(script.replace("127.0.0.1:8000", address), "README.md", "exec"), {})
    assert printed in capsys.readouterr().out
    # An engine's two gigabytes of cache, in a ring of references.
    gc.collect()


def test_it_writes_json(tiny):
    text = ask(tiny, "Write a JSON object with name Emil, age 31, city Lyon").message.content
    assert json.loads(text or "") == {"name": "Emil", "age": 31, "city": "Lyon"}


def test_it_calls_a_tool_streamed_and_whole(tiny):
    choice = ask(tiny, "What is the weather in Oslo?", tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Oslo"
    stream = tiny.chat.completions.create(
        model="tiny-dsa",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        temperature=0,
        max_tokens=100,
        tools=[WEATHER],
        stream=True,
    )
    deltas = [c for chunk in stream for c in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function and deltas[0].function.name == "get_weather"
    arguments = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert arguments == call.function.arguments


def test_it_thinks_when_asked_to(tiny):
    thinking = {"chat_template_kwargs": {"thinking": True}}
    message = ask(tiny, "What is 7 + 5?", extra_body=thinking).message
    assert "12" in (message.content or "")
    assert message.model_extra and "7 + 5" in message.model_extra["reasoning_content"]
    plain = ask(tiny, "What is 7 + 5?").message
    assert not (plain.model_extra or {}).get("reasoning_content")


def test_api_89_the_sdk_parses_what_it_asked_for(tiny):
    answer = tiny.chat.completions.parse(
        model="tiny-dsa",
        messages=[{"role": "user", "content": "Write a JSON object about a person"}],
        response_format=Person,
        temperature=1.0,
        seed=5,
        max_tokens=200,
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and 1 <= len(person.pets) <= 2


def test_spec_05_bound_answers_of_many_at_once(tiny):
    """All of them valid, streamed as whole, and the free ones beside them as they are alone."""
    schema = {"type": "object", "properties": {"result": {"type": "string", "maxLength": 30}}}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "r", "schema": schema | {"required": ["result"]}},
    }
    alone = ask(tiny, "Hello!").message.content

    def one(number: int) -> str:
        if number % 6 == 0:
            assert ask(tiny, "Hello!").message.content == alone
            return '{"result": ""}'
        stream = tiny.chat.completions.create(
            model="tiny-dsa",
            messages=[{"role": "user", "content": f"Say {number}"}],
            response_format=form,
            temperature=1.0,
            seed=number,
            max_tokens=200,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(12) as pool:
        for text in pool.map(one, range(24)):
            assert json.loads(text).keys() == {"result"}


@pytest.mark.parametrize("thinking", [False, True])
def test_api_75_a_required_call_always_comes(tiny, thinking):
    """Asked something that needs no tool, at a high temperature."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for seed, choice in enumerate(["required", named] * 3):
        answer = tiny.chat.completions.create(
            model="tiny-dsa",
            messages=[{"role": "user", "content": "Hello!"}],
            tools=[STRICT],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=1.5,
            seed=seed,
            max_tokens=600,
            extra_body={"thinking": thinking},
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert len(arguments.pop("city")) <= 12 and arguments in ({}, {"unit": "c"}, {"unit": "f"})


def test_num_16_a_fact_far_behind_the_selection_is_found(tiny):
    """The question is hundreds of tokens after the fact, index_topk is 64: the indexer finds it."""
    rng = random.Random(4)
    names = ("rusty anchor", "tiny harp", "blue kettle", "old drum", "quiet lamp", "red kite")
    codes = {name: str(rng.randrange(1000, 10_000)) for name in names}
    facts = [f"The secret code of the {name} is {code}." for name, code in codes.items()]
    filler = "A sleepy otter slept beside the fern. " * 40
    question = "What is the secret code of the tiny harp?"
    told = f"{' '.join(facts)} {filler}".strip()
    choice = ask(tiny, told, "I will remember that.", question)
    assert codes["tiny harp"] in (choice.message.content or "")


def test_the_fp8_twin_gives_the_same_answers(tmp_path):
    from training.fp8 import write_twin

    shipped = ROOT / "checkpoints" / "tiny-dsa"
    write_twin(shipped, tmp_path)
    config = EngineConfig(num_threads=1, cache=CacheConfig(num_pages=64))
    params = SamplingParams(max_tokens=40, seed=0, temperature=0.0)
    prompts = [
        f"<｜begin▁of▁sentence｜><｜User｜>{question}<｜Assistant｜></think>"
        for question in ("What is the capital of Norway?", "What is 7 + 5?")
    ]
    own, twin = (
        OfflineEngine.load(folder, Tokenizer.from_directory, config).generate(prompts, params)
        for folder in (shipped, tmp_path)
    )
    assert [answer.text for answer in twin] == [answer.text for answer in own]
    assert "Oslo" in own[0].text and own[0].finish_reason == "stop"
