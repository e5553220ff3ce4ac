"""Structured output over HTTP: an engine that emits any legal token, and the process of trials."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from grammar_bed import (
    EOS,
    VOCAB,
    control_id,
    ids_of,
    legal_ids,
    scripted,
    small_compiler,
    text_of,
    write_tokenizer,
)
from minidsa.configs.engine import EngineConfig
from minidsa.scheduler.messages import Submit
from minidsa.server import grammar_trials
from minidsa.server.grammar_trials import GrammarRefused, GrammarTrials
from patience import PATIENCE
from scripted_engine import INFO, Bed, Script, server_config, serving
from sse_reader import both, post
from written_answers import CALL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
THINK: dict[str, Any] = {"thinking": True}
WIDE = msgspec.structs.replace(INFO, max_model_len=4096)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 1, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "ü"]}, "maxItems": 3},
        "kind": {"$ref": "#/$defs/kind"},
    },
    "required": ["name", "n", "kind"],
    "$defs": {"kind": {"enum": ["x", "y"]}},
}
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "word": {"type": "string", "maxLength": 6},
    },
    "required": ["a", "word"],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "stop", "parameters": {"properties": {}}}},
]
ONLY_ADD = {"type": "function", "function": {"name": "add"}}


def json_schema(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def json_only(schema) -> dict:
    """The same schema without its place in the prompt."""
    return {"structured_outputs": {"json": schema}}


@contextlib.asynccontextmanager
async def grammar_bed(folder: Path, script: Script = scripted, **settings) -> AsyncIterator[Bed]:
    write_tokenizer(folder)
    config = server_config(engine=EngineConfig(model=str(folder)))
    async with serving(script, info=WIDE, config=config, **settings) as bed:
        yield bed


async def choice_of(bed: Bed, path: str = CHAT, **body: Any) -> dict:
    body = ({"messages": HI} if path == CHAT else {"prompt": "hi"}) | {"max_tokens": 400} | body
    response = await post(bed, path, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def refusal_of(bed: Bed, path: str = CHAT, **body: Any) -> dict:
    body = ({"messages": HI} if path == CHAT else {"prompt": "hi"}) | body
    start = time.perf_counter()
    response = await post(bed, path, **body)
    assert time.perf_counter() - start < 2 * PATIENCE
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    for trace in ("Traceback", ".rs", ".py", "site-packages", "\n"):
        assert trace not in error["message"]
    return error


async def test_api_88_json_object_is_an_object(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        ended = 0
        for seed in range(10):
            choice = await choice_of(bed, response_format={"type": "json_object"}, seed=seed)
            text = choice["message"]["content"]
            assert text.lstrip().startswith("{")
            if choice["finish_reason"] == "stop":
                ended += 1
                assert isinstance(json.loads(text), dict)
        assert ended


async def test_api_89_api_94_every_way_to_ask_for_a_form(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        for path in (CHAT, COMPLETIONS):
            for fields in (
                {"response_format": json_schema(SCHEMA)},
                {"structured_outputs": {"json": SCHEMA}},
                {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            ):
                choice = await choice_of(bed, path, **fields)
                text = choice["message"]["content"] if path == CHAT else choice["text"]
                assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
                jsonschema.validate(json.loads(text), SCHEMA)
            for fields, allowed in (
                ({"structured_outputs": {"choice": ["red", "a b/\n\u0001", "ü😀"]}}, None),
                ({"structured_outputs": {"regex": "^one$"}}, "one"),
                ({"regex": "tw\\w"}, None),
                ({"structured_outputs": {"grammar": 'root ::= "x" y\ny ::= "1" y?'}}, None),
                ({"ebnf": 'root ::= "three"'}, "three"),
            ):
                choice = await choice_of(bed, path, **fields)
                text = choice["message"]["content"] if path == CHAT else choice["text"]
                assert allowed in (None, text)
                if allowed is None:
                    assert text in ("red", "a b/\n\u0001", "ü😀") or text[:1] in "tx"


async def test_streams_equal_whole_answers_in_every_form(tmp_path):
    requests = (
        {"response_format": json_schema(SCHEMA), "logprobs": True},
        {"response_format": json_schema(SCHEMA), **THINK, "n": 2, "seed": 4},
        {"structured_outputs": {"choice": ["red", "green"]}, "return_token_ids": True},
        {"tools": TOOLS, "tool_choice": "required", "seed": 2},
        {"tools": TOOLS, "tool_choice": ONLY_ADD, **THINK},
    )
    for burst in (1, 3):
        async with grammar_bed(tmp_path, burst=burst) as bed:
            for fields in requests:
                body = {"messages": HI, "max_tokens": 300, "seed": 1} | fields
                assert await both(bed, CHAT, **body)


async def test_api_67_thoughts_are_free_and_the_answer_is_bound(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        for seed in range(6):
            choice = await choice_of(
                bed, response_format=json_schema(SCHEMA), **THINK, seed=seed, max_tokens=600
            )
            message = choice["message"]
            if choice["finish_reason"] == "stop":
                assert message["reasoning_content"]
                jsonschema.validate(json.loads(message["content"]), SCHEMA)
            else:
                assert message["content"] is None or message["content"][0] in "{ \n"


async def test_api_75_api_76_required_and_named_calls_cannot_fail(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        for thinking in ({}, THINK):
            for wanted in ("required", ONLY_ADD):
                ended = 0
                for seed in range(8):
                    choice = await choice_of(
                        bed, tools=TOOLS, tool_choice=wanted, seed=seed, max_tokens=900, **thinking
                    )
                    if choice["finish_reason"] == "length":
                        continue
                    ended += 1
                    assert choice["finish_reason"] == "tool_calls"
                    assert choice["message"]["content"] is None
                    calls = choice["message"]["tool_calls"]
                    assert calls
                    for call in calls:
                        arguments = json.loads(call["function"]["arguments"])
                        if call["function"]["name"] == "add":
                            jsonschema.validate(arguments, ADD)
                        else:
                            assert wanted == "required" and arguments == {}
                    assert wanted == "required" or len(calls) == 1
                assert ended > 1


def spell(text: str, submit: Submit) -> list[int]:
    """The ids of a text in the shortest tokens that the grammar of a request lets come."""
    matcher = small_compiler().compile(submit.grammar or "", submit.params)
    ids: list[int] = []
    while text:
        legal = [i for i in legal_ids(matcher.mask()) if i != EOS and text.startswith(text_of([i]))]
        if not legal:
            return ids
        ids.append(min(legal, key=lambda i: len(text_of([i]))))
        matcher.accept(ids[-1:])
        text = text.removeprefix(text_of(ids[-1:]))
    return ids


@pytest.mark.parametrize("by_letter", [False, True])
async def test_api_87_a_required_call_in_ordinary_tokens_is_a_call(tmp_path, by_letter):
    """As ordinary as the grammar lets its markers be, and without any control token."""
    call = CALL.format(note="x").replace("note", "word")

    def script(submit: Submit) -> list[int]:
        return [i for c in call for i in ids_of(c)] if by_letter else spell(call, submit)

    async with grammar_bed(tmp_path, script) as bed:
        answers = await both(bed, CHAT, messages=HI, tools=TOOLS, tool_choice="required")
    (called,) = answers[0]["calls"].values()
    assert (called["name"], json.loads(called["arguments"])) == ("add", {"a": 2, "word": "x"})
    assert (answers[0]["content"], answers[0]["finish_reason"]) == ("", "tool_calls")


async def test_one_call_where_parallel_calls_are_off(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        for seed in range(6):
            choice = await choice_of(
                bed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
            )
            assert len(choice["message"]["tool_calls"]) == 1


async def test_api_86_strict_tools_bind_calls_and_leave_text_free(tmp_path):
    strict = [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}]
    loose = [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": False}}]
    async with grammar_bed(tmp_path) as bed:
        await choice_of(bed, tools=strict, max_tokens=5)
        await choice_of(bed, tools=loose, max_tokens=5)
        await choice_of(bed, tools=strict, tool_choice="none", max_tokens=5)
        await choice_of(bed, tools=loose, tool_choice="required", max_tokens=5)
        grammars = [submit.grammar for submit in bed.engine.submits]
        assert [grammar is None for grammar in grammars] == [False, True, True, False]
        assert "LEAD" in (grammars[0] or "") and "word" not in (grammars[3] or "")


async def test_api_93_a_form_beside_tools_is_either_a_call_or_that_form(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        kinds = set()
        for seed in range(12):
            choice = await choice_of(
                bed, tools=TOOLS, response_format=json_schema(SCHEMA), seed=seed, max_tokens=900
            )
            kinds.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert {"stop", "tool_calls"} <= kinds
        await choice_of(bed, response_format={"type": "text"}, max_tokens=3)
        assert bed.engine.submits[-1].grammar is None


async def test_api_90_an_answer_that_is_cut_says_so(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        choice = await choice_of(bed, response_format=json_schema(SCHEMA), max_tokens=4)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].lstrip().startswith("{")


async def test_the_schema_stands_in_the_prompt_of_generation_and_of_tokenize(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        form = json_schema(SCHEMA)
        await choice_of(bed, response_format=form, max_tokens=2)
        ids = bed.engine.submits[-1].prompt_ids
        assert "## Response Format:" in bed.tokenizer.decode(ids)
        assert json.dumps(SCHEMA, ensure_ascii=False) in bed.tokenizer.decode(ids)
        answer = await post(bed, "/tokenize", messages=HI, response_format=form)
        assert answer.json()["tokens"] == ids


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"response_format": json_schema({"items": {"not": {}}})},
        "response_format.json_schema.schema.items.not",
    ),
    (
        {"response_format": json_schema({"type": "string", "pattern": "(?=a)"})},
        "response_format.json_schema.schema",
    ),
    ({"response_format": json_schema({"$ref": "#"})}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: X"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= foo"}}, "structured_outputs.grammar"),
    ({"ebnf": "root ::= " + "(" * 4000 + '"a"' + ")" * 4000}, "ebnf"),
    ({"ebnf": "root ::= root"}, "ebnf"),
    ({"regex": "x" * 300_000}, "regex"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools.0.function.parameters.not",
    ),
)


async def test_api_91_what_cannot_be_served_is_named_and_harms_nobody(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        for fields, param in REFUSED:
            error = await refusal_of(bed, **fields, stream=True)
            assert (error["param"], error["code"]) == (param, "invalid_schema")
        assert bed.engine.submits == []
        assert (await choice_of(bed, regex="ok"))["message"]["content"] == "ok"


async def test_two_forms_at_once_are_refused(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        requests: list[dict[str, Any]] = [
            {"structured_outputs": {"choice": ["a"], "regex": "b"}},
            {"regex": "a", "ebnf": 'root ::= "a"'},
            {"response_format": {"type": "json_object"}, "regex": "a"},
            {"structured_outputs": {}},
        ]
        for fields in requests:
            assert (await refusal_of(bed, **fields))["code"] == "invalid_value"
        error = await refusal_of(bed, tool_choice="required")
        assert (error["param"], error["code"]) == ("tool_choice", "invalid_value")
        other = {"type": "function", "function": {"name": "nobody"}}
        assert (await refusal_of(bed, tools=TOOLS, tool_choice=other))["param"] == "tool_choice"
        assert (await refusal_of(bed, tool_choice=other))["param"] == "tool_choice"


HOSTILE: tuple[dict[str, Any], ...] = (
    {"regex": "(((a{1000}){1000}){1000})"},
    {"regex": "(.*a.{40}|.*b.{41}|.*c.{42}){9}"},
    {"regex": "((((a?){9}){9}){9}){9}" * 20},
    {"ebnf": "root ::= " + " ".join(f'("a" | "b{i}")*' for i in range(3000))},
    {"ebnf": "\n".join(f'r{i} ::= "w{i}" r{i + 1}' for i in range(6000)) + "\nroot ::= r0"},
    json_only({"allOf": [{"type": "integer", "multipleOf": n} for n in (991, 997, 983, 977)]}),
    json_only({"properties": {f"p{i}": {} for i in range(3000)}}),
    json_only({"minItems": 10**6, "items": {"type": "string", "minLength": 10**6}}),
    json_only({"enum": [f"value {i}" * 9 for i in range(4000)]}),
    json_only(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"k{i}{j}": {"type": "integer"}}} for j in range(8)]}
                for i in range(8)
            ]
        }
    ),
)


async def test_hostile_grammars_are_bounded(tmp_path):
    """Served or refused, in bounded time, while the event loop goes on and others are served."""
    async with grammar_bed(tmp_path) as bed:
        for fields in HOSTILE:
            hostile = asyncio.create_task(post(bed, CHAT, messages=HI, max_tokens=3, **fields))
            while not hostile.done():
                await asyncio.sleep(0.02)
                assert (await bed.client.get("/live")).status_code == 200
            response = hostile.result()
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                assert response.json()["error"]["code"] == "invalid_schema"
        assert (await choice_of(bed, regex="ok"))["message"]["content"] == "ok"


async def test_a_crash_of_the_trial_is_a_refusal_and_the_next_one_works(tmp_path):
    write_tokenizer(tmp_path)
    trials = GrammarTrials(tmp_path, VOCAB, [EOS])
    try:
        await trials.check('start: "a"')
        process = trials._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(trials.check('start: "b"'))
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(GrammarRefused, match="too long or too much memory"):
            await waiting
        await trials.check('start: "c"')
        cancelled = asyncio.create_task(trials.check('start: "d"'))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(GrammarRefused):
            await trials.check("start: e")
    finally:
        await trials.close()
    await trials.close()


async def test_a_trial_that_never_answers_is_given_up(tmp_path, monkeypatch):
    write_tokenizer(tmp_path)
    trials = GrammarTrials(tmp_path, VOCAB, [EOS])
    try:
        await trials.check('start: "a"')
        assert trials._process is not None
        os.kill(trials._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(grammar_trials, "ANSWER_SECONDS", 0.1)
        with pytest.raises(GrammarRefused):
            await trials.check('start: "b"')
    finally:
        await trials.close()


async def test_verdicts_are_remembered(tmp_path):
    write_tokenizer(tmp_path)
    trials = GrammarTrials(tmp_path, VOCAB, [EOS])
    try:
        await trials.check('start: "a"')
        await trials.close()
        await trials.check('start: "a"')
        assert trials._process is None
    finally:
        await trials.close()


async def test_a_tokenizer_that_grammars_cannot_use_refuses_the_field_alone(tmp_path):
    config = server_config(engine=EngineConfig(model=str(tmp_path)))
    async with serving(scripted, config=config) as bed:
        error = await refusal_of(bed, regex="a")
        assert error["code"] == "unsupported_parameter" and "tokenizer.json" in error["message"]
        assert (await post(bed, CHAT, messages=HI, max_tokens=2)).status_code == 200


async def test_a_stop_string_may_cut_a_form(tmp_path):
    async with grammar_bed(tmp_path) as bed:
        choice = await choice_of(bed, regex="[a-z]{3}STOP[a-z]{3}", stop=["STOP"])
        assert len(choice["message"]["content"]) == 3
        assert choice["stop_reason"] == "STOP"


def test_the_end_of_thinking_has_an_id_in_the_small_vocabulary():
    assert control_id("</think>") < 11
