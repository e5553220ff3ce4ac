"""Fields of requests: strict types, ranges, nulls, neutral values, unknown names."""

from typing import Any

import pytest

from minidsa.server.chat_protocol import ChatRequest
from minidsa.server.errors import ApiError
from minidsa.server.messages_api.protocol import MessagesRequest
from minidsa.server.protocol import CompletionRequest
from minidsa.server.responses_api.protocol import ResponsesRequest
from minidsa.server.sampling import OutputShape, SamplingDefaults, child_seed, resolve
from minidsa.server.side_protocol import TokenizeRequest
from minidsa.server.validation import validate
from scripted_engine import INFO

MESSAGES = [{"role": "user", "content": "hi"}]
INTEGERS = (
    "max_tokens", "max_completion_tokens", "n", "best_of", "seed", "top_k", "min_tokens",
    "prompt_logprobs", "logprobs", "priority",
)  # fmt: skip
FLOATS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
BOOLS = (
    "include_stop_str_in_output", "no_stop_trim", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "return_token_ids", "stream", "echo", "add_special_tokens",
)  # fmt: skip


def completion(**fields: Any) -> CompletionRequest:
    return validate(CompletionRequest, {"prompt": "hi"} | fields)


def chat(**fields: Any) -> ChatRequest:
    return validate(ChatRequest, {"messages": MESSAGES} | fields)


def refusal(make: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [10**30, 10**40, 1.0, "3", True, [1], {}])
def test_abu_03_integers_are_strict(field, value):
    assert refusal(completion, **{field: value}).param == field


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan", "1", True, -2.1, 10**30])
def test_abu_01_floats_are_strict_and_finite(field, value):
    assert refusal(completion, **{field: value}).param == field


@pytest.mark.parametrize("field", BOOLS)
@pytest.mark.parametrize("value", [0, 1, "true", 1.0])
def test_bools_are_strict(field, value):
    assert refusal(completion, **{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.5), ("min_p", -1),
        ("n", 0), ("n", 129), ("n", 10**6), ("n", 10**30), ("max_tokens", -1), ("logprobs", 21),
        ("logprobs", -1), ("logprobs", 10**9), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 2**64), ("top_k", -2),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300), ("stop_token_ids", [True]), ("stop_token_ids", 5),
        ("stop", [1]), ("stop", ""), ("stop", [""]), ("stop", ["a"] * 17), ("stop", {"a": 1}),
        ("stop", "a" * 1025), ("stop", ["a" * 600, "b" * 600]),
        ("model", 5), ("stream_options", True), ("stream_options", {"include_usage": 1}),
        ("suffix", 1),
    ],
)  # fmt: skip
def test_api_51_ranges(field, value):
    assert (refusal(completion, **{field: value}).param or "").startswith(field)


@pytest.mark.parametrize("field", ["top_logprobs"])
@pytest.mark.parametrize("value", [21, -1, 10**9, True])
def test_abu_05_top_logprobs_have_a_bound(field, value):
    assert refusal(chat, logprobs=True, **{field: value}).param == field


@pytest.mark.parametrize("value", [0, 2**63 - 1, -(2**63), -1])
def test_http_20_every_int64_is_a_seed(value):
    assert completion(seed=value).seed == value


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_api_22_null_equals_absence(model):
    required = {"prompt": "hi"} if model is CompletionRequest else {"messages": MESSAGES}
    nulls = dict.fromkeys(model.model_fields.keys() - required.keys())
    nulls |= dict.fromkeys(("user", "guided_json", "store", "anything"))
    assert validate(model, required | nulls) == validate(model, required)


def test_api_24_harmless_fields_pass_and_unknown_ones_are_named():
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "use_beam_search": False,
        "length_penalty": 1.0, "priority": 0, "response_format": {"type": "text"},
        "return_hidden_states": False, "bad_words": [], "logits_processors": [],
    }  # fmt: skip
    assert completion(**harmless) == completion()
    of_chats = {"suffix": "", "functions": [], "function_call": "none", "echo": False}
    assert chat(**harmless, **of_chats) == chat()
    for name, value in (
        ("guided_foo", "x"), ("extra_body", {}), ("store", True), ("service_tier", "flex"),
        ("use_beam_search", True), ("length_penalty", 2), ("use_beam_search", 0),
        ("chat_template", "x"), ("documents", []), ("truncate", 1),
        ("bad_words", ["x"]), ("return_hidden_states", True),
    ):  # fmt: skip
        for make in (completion, chat):
            error = refusal(make, **{name: value})
            assert (error.param, error.code) == (name, "unsupported_parameter")
            assert name in error.message


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "response_format"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": [1]}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}},
            "response_format.json_schema.mode",
        ),
    ],
)
def test_api_91_malformed_response_formats_are_named(value, param):
    for make in (chat, completion):
        assert refusal(make, response_format=value).param == param


def test_structured_outputs_are_typed():
    for field, value in (("regex", 5), ("regex", ""), ("choice", []), ("choice", [1]), ("foo", 1)):
        error = refusal(chat, structured_outputs={field: value})
        assert error.param is not None and error.param.startswith(f"structured_outputs.{field}")
    for name in ("guided_json", "guided_regex"):
        assert refusal(chat, **{name: "a"}).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 101), ("priority", -101), ("priority", 1.0), ("priority", True)]
    + [("deadline_seconds", value) for value in (0, -1, 86_401, "5")],
)
def test_priorities_and_deadlines_have_a_range(name, value):
    assert refusal(completion, **{name: value}).param == name


@pytest.mark.parametrize(
    "value", [[], [[]], [[], [1]], ["a", 1], [1, [2]], [1.5], [True], 5, {"a": 1}, [[True]], [None]]
)
def test_api_13_prompts_of_no_known_form(value):
    assert refusal(completion, prompt=value).param == "prompt"


@pytest.mark.parametrize("value", [[], [[]], [[], [1]]])
def test_a_prompt_without_ids_is_told_as_that(value):
    assert "holds no tokens" in refusal(completion, prompt=value).message


def test_prompts_of_every_form():
    for value, prompts in (
        ("", [""]), ("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):  # fmt: skip
        assert completion(prompt=value).prompt == prompts


@pytest.mark.parametrize(
    "biases",
    [
        {"-1": 1}, {"01": 1}, {"1e2": 1}, {"٣": 1}, {"": 1}, {"abc": 1}, {"1" * 40: 1},
        {"1": float("nan")}, {"1": 1e9}, {"1": "5"}, {"1": True}, {"1": None}, {" 1": 1},
        {str(i): 1 for i in range(1025)}, [1],
    ],
)  # fmt: skip
def test_abu_06_biases(biases):
    assert refusal(completion, logit_bias=biases).param == "logit_bias"


def test_biases_in_range_pass():
    biases = {str(i): -100 + i / 8 for i in range(1024)}
    assert completion(logit_bias=biases).logit_bias == biases


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"), ("hi", "messages"), ([{"content": "x"}], "messages.0.role"),
        ([{"role": "foo", "content": "x"}], "messages.0.role"), (["hi"], "messages.0"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([*MESSAGES, {"role": "user", "content": "x", "audio": "y"}], "messages.1.audio"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages.0.tool_calls.0.function"),
    ],
)  # fmt: skip
def test_api_53_messages_by_path(messages, param):
    assert refusal(chat, messages=messages).param == param


def test_api_53_messages_are_required():
    with pytest.raises(ApiError, match="messages is required"):
        validate(ChatRequest, {})


def test_api_25_parts():
    def content(value: Any) -> str | None:
        return chat(messages=[{"role": "user", "content": value}]).messages[0].content

    assert content([{"type": "text", "text": "a"}]) == content("a")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert content(parts) == "a\n\nb"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    error = refusal(chat, messages=[{"role": "user", "content": image}])
    assert "image_url" in error.message
    assert (error.param, error.code) == ("messages.0.content", "unsupported_parameter")


def test_abu_11_template_arguments_are_a_closed_list():
    assert chat(chat_template_kwargs={"thinking": True, "enable_thinking": None}).wants_thinking(
        False
    )
    for kwargs in ({"tokenize": False}, {"thinking": "yes"}, {"chat_template": "x"}, []):
        assert refusal(chat, chat_template_kwargs=kwargs).param == "chat_template_kwargs"
        with pytest.raises(ApiError):
            validate(TokenizeRequest, {"messages": MESSAGES, "chat_template_kwargs": kwargs})


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"thinking": True}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}, "thinking": False}, True),
        ({"chat_template_kwargs": {"thinking": False, "enable_thinking": True}}, False),
        ({"chat_template_kwargs": {}, "thinking": True}, True),
    ],
)
def test_http_07_spellings_of_the_thinking_switch(fields, thinks):
    assert chat(**fields).wants_thinking(False) is thinks


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("maybe", "tool_choice"),
        (5, "tool_choice"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "custom", "function": {"name": "f"}}, "tool_choice.type"),
        ({"function": {}}, "tool_choice.function.name"),
        ({}, "tool_choice.function"),
    ],
)
def test_malformed_tool_choices_are_refused(choice, param):
    error = refusal(chat, tool_choice=choice)
    assert (error.param, error.code) == (param, "invalid_value")


def test_the_type_of_a_function_may_be_left_out():
    named = chat(tools=[{"function": {"name": "f"}}], tool_choice={"function": {"name": "f"}})
    typed = {"type": "function", "function": {"name": "f"}}
    assert named == chat(tools=[typed], tool_choice=typed)


VALUES = (True, "x", "", 1.5, -1, 10**30, [], [[]], [1, "a"], {}, {"type": "x"}, float("nan"))


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, TokenizeRequest, ResponsesRequest, MessagesRequest]
)
def test_a_refusal_is_in_our_words(model):
    """No text of the validating library, and never only that something is wrong."""
    for field in model.model_fields:
        for value in VALUES:
            try:
                validate(model, {field: value})
            except ApiError as error:
                problems = [p for p in error.message.split("; ") if p.startswith(field)]
                for word in ("Input", "valid", "should", "discriminator", "not taken", "{"):
                    assert not any(word in p.partition(", not ")[0] for p in problems), problems


def test_many_problems_are_cut_to_ten():
    error = refusal(completion, **{f"x{i}": i for i in range(30)})
    assert "and 20 more" in error.message
    assert len(error.message) < 1000


def test_abu_02_tiny_temperatures_are_greedy():
    shape = OutputShape(4, None, None)
    for value, expected in ((1e-320, 0.0), (9e-6, 0.0), (-0.0, 0.0), (0, 0.0), (1e-5, 1e-5)):
        params = resolve(completion(temperature=value), shape, SamplingDefaults(), 0, INFO)
        assert params.temperature == expected


def test_api_23_top_k_values_that_are_off():
    shape = OutputShape(4, None, None)
    for value in (-1, 0, 512, 10**9, None):
        params = resolve(completion(top_k=value), shape, SamplingDefaults(), 0, INFO)
        assert params.top_k == 0


def test_seeds_of_children_differ_and_repeat():
    seeds = [child_seed(7, child) for child in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128
    assert seeds == [child_seed(7, child) for child in range(128)]
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert len({child_seed(seed, 1) for seed in (2**63 - 1, -(2**63), -1, 0)}) == 4
