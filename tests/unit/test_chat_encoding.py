"""DeepSeek-V3.2's prompt, byte for byte, and what the request layer does around it.

The golden digests were made once with the program published in the model repository, run on the
same chats. The encoder was checked against that program and against the fixtures stored in
ai-dynamo/dynamo (`lib/llm/tests/data/deepseek-v3.2/test_input.json`, tools on message 0: thinking
705aec24..., chat 9a3452df...), and on 20,000 random chats.
"""

import hashlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidsa.server.chat_encoding import (
    RESPONSE_FORMAT,
    TOOLS_BLOCK,
    encode_messages,
    start_marker,
    tools_runs,
)
from minidsa.server.chat_messages import InvalidMessagesError, Message, ToolCall
from minidsa.server.chat_request import encode_request, mark_prefill, sort_results
from minidsa.server.prompt_runs import Control, prompt_text
from tokenizers_small import small_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(call_id: str, name: str = "look", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False))


def user(content: str) -> Message:
    return Message(role="user", content=content)


def result(call_id: str, content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id=call_id)


def assistant(content: str | None = None, *calls: ToolCall, **fields: Any) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, **fields)


TOOLS = (tool("look", place={"type": "string"}), tool("count", bis={"type": "integer", "é": "ü"}))
LOOP = [
    Message(role="system", content="Be brief.", tools=TOOLS, response_schema={"type": "object"}),
    user("Where is it?"),
    assistant("Looking.", call("a", place="Köln\n", depth=2, deep={"x": [1.5, None, True]})),
    result("a", "not here"),
    assistant("Not there.", reasoning="Old thought."),
    user("And now?\n"),
    assistant(None, call("b"), call("c", "count", bis=3), reasoning="Two at once."),
    result("b", "{}"),
    result("c", "3"),
    assistant("It is 3.", reasoning="Done."),
]
DEVELOPER = [
    Message(role="developer", content="Search first.", tools=TOOLS),
    assistant("", call("a", place="x"), reasoning="R"),
    result("a", "found"),
]


def encode(messages: list[Message], thinking: bool, tools=(), **options: Any) -> str:
    return prompt_text(encode_request(messages, tools, thinking, **options))


def digest(text: str) -> tuple[int, str]:
    return len(text), hashlib.sha256(text.encode()).hexdigest()


def test_api_70_the_fixed_texts_are_exact():
    assert digest(TOOLS_BLOCK) == (
        1089,
        "963a72ee9be43f07d21bec2348ed2d7e45185e4b502f2a4da35a540299dc2b03",
    )
    assert digest(RESPONSE_FORMAT) == (
        80,
        "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112",
    )


@pytest.mark.parametrize(
    ("messages", "thinking", "golden"),
    [
        (
            LOOP,
            True,
            (2323, "d7b11a3c7af4dab79fad14cc84369312d8770230df3261d0496ecb758bcdeb62"),
        ),
        (
            LOOP,
            False,
            (2292, "76f2c4b26fbd9502183f9f0873b7ff39fc4a7918d48dd56983b9d0b64d73a3ad"),
        ),
        (
            DEVELOPER,
            True,
            (1650, "8a452635ed1a8f6085f8b8791db5d2f8ff0719073bd1c49a4280bcaa1f5107b5"),
        ),
        (
            DEVELOPER,
            False,
            (1643, "d2286afd8440f3028012bc4bafc1292439a4700b0bdbf7d37baebe074d5b2c4d"),
        ),
    ],
    ids=["loop-thinking", "loop-chat", "developer-thinking", "developer-chat"],
)
def test_http_01_api_70_prompts_equal_the_published_program_s(messages, thinking, golden):
    assert digest(prompt_text(encode_messages(messages, thinking))) == golden


def test_http_01_a_plain_chat():
    chat = [Message(role="system", content="S"), user("q"), assistant("a"), user("r")]
    history = f"{BOS}S{USER}q{ASSISTANT}</think>a{EOS}{USER}r{ASSISTANT}"
    assert encode(chat, thinking=False) == history + "</think>"
    assert encode(chat, thinking=True) == history + "<think>"


def test_api_66_thoughts_vanish_with_the_next_user_turn_and_stay_in_a_tool_loop():
    text = prompt_text(encode_messages(LOOP, thinking=True))
    assert "Old thought." not in text
    assert "<think>Two at once.</think>\n\n<｜DSML｜function_calls>" in text
    assert "</function_results>\n\n<think>Done.</think>It is 3." in text


def test_api_72_a_call_without_parameters_leaves_an_empty_line():
    text = prompt_text(encode_messages(LOOP, thinking=False))
    assert '<｜DSML｜invoke name="look">\n\n</｜DSML｜invoke>\n' in text


def test_api_71_developers():
    first = Message(role="developer", content="D")
    assert encode([first, user("q")], False) == f"{BOS}D{USER}q{ASSISTANT}</think>"
    later = [user("p"), Message(role="developer", content="D")]
    expected = f"{USER}\n\n# The user's message is: D{ASSISTANT}"
    assert encode(later, True).endswith(f"{expected}<think>")
    assert expected in encode([*later, user("q")], thinking=False)
    assert "# The user's message" not in encode([*later, user("q")], thinking=True)


def test_an_empty_developer_message_is_refused():
    for content in ("", None):
        with pytest.raises(InvalidMessagesError) as caught:
            encode([user("p"), Message(role="developer", content=content)], False)
        assert caught.value.param == "messages.1.content"


def test_api_74_one_tools_block_behind_the_system_text():
    text = encode([Message(role="system", content="S"), user("q")], False, TOOLS)
    assert text.startswith(f"{BOS}S\n\n## Tools\n\n")
    alone = encode([user("q")], False, TOOLS)
    assert alone == text.replace("S\n\n## Tools", "\n\n## Tools", 1)
    assert text.count("## Tools") == 1
    assert encode([user("q")], False, ()) == f"{BOS}{USER}q{ASSISTANT}</think>"


def test_request_tools_replace_those_of_messages():
    chat = [user("p"), Message(role="developer", content="D", tools=TOOLS)]
    text = encode(chat, False, (tool("other"),))
    assert text.count("## Tools") == 1
    assert '{"name": "other"' in text and '{"name": "look"' not in text


def test_a_schema_goes_behind_the_tools():
    text = encode([user("q")], False, TOOLS, response_schema={"type": "object"})
    assert "</functions>\n\n\n## Response Format:\n\n" in text
    assert text.endswith(f'reply:\n{{"type": "object"}}{USER}q{ASSISTANT}</think>')


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "chat",
    [[Message(role="system", content="S")], [user("q"), assistant("a")]],
    ids=["system", "assistant"],
)
def test_the_assistant_s_marker_is_appended_where_the_prompt_would_not_end_open(chat, thinking):
    marker = "<think>" if thinking else "</think>"
    assert encode(chat, thinking).endswith(f"{ASSISTANT}{marker}")
    bare = encode(chat, thinking, add_generation_prompt=False)
    assert encode(chat, thinking) == f"{bare}{ASSISTANT}{marker}"


@pytest.mark.parametrize(
    ("last", "thinking", "end", "start"),
    [
        (assistant("```python\n"), False, "</think>```python\n", "content"),
        (assistant("ab"), True, "<think></think>ab", "content"),
        (assistant("ab", reasoning="R"), True, "<think>R</think>ab", "content"),
        (assistant(None, reasoning="R"), True, "<think>R", "reasoning"),
        (assistant(""), True, "<think>", "reasoning"),
        (assistant(None, reasoning="R"), False, "</think>", "content"),
    ],
)
def test_api_68_a_prefill_stays_open(last, thinking, end, start):
    for chat, continue_final in (
        ([user("q"), last], True),
        ([user("q"), Message(**{**fields(last), "prefix": True})], False),
    ):
        runs = encode_request(mark_prefill(chat, continue_final, None), (), thinking)
        assert prompt_text(runs).endswith(f"q{ASSISTANT}{end}")
        assert start_marker(runs) == start


def fields(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


@pytest.mark.parametrize(
    ("chat", "continue_final", "add", "param"),
    [
        ([user("q")], True, None, "messages.0"),
        ([user("q"), assistant("a")], True, True, "add_generation_prompt"),
        ([assistant("a", prefix=True), user("q")], False, None, "messages.0.prefix"),
        ([user("q"), assistant("a", call("x"))], True, None, "messages.1"),
        ([], False, None, "messages"),
    ],
)
def test_api_69_what_cannot_be_continued(chat, continue_final, add, param):
    with pytest.raises(InvalidMessagesError) as caught:
        mark_prefill(chat, continue_final, add)
    assert caught.value.param == param


def test_results_are_sorted_as_their_calls():
    turn = assistant(None, call("a"), call("b"))
    chat = [user("q"), turn, result("b", "second"), result("a", "first")]
    assert [m.content for m in sort_results(chat)[2:]] == ["first", "second"]
    assert "<result>first</result>\n<result>second</result>\n</function_results>" in encode(
        chat, False
    )


MUST_FOLLOW = "must be followed by tool messages"
MUST_RESPOND = "must be a response to a preceding message with 'tool_calls'"


@pytest.mark.parametrize(
    ("tail", "param", "words"),
    [
        ([result("a", "")], "messages.1", MUST_RESPOND),
        ([assistant(None, call("a"))], "messages.1.tool_calls", MUST_FOLLOW),
        ([assistant(None, call("a")), user("x")], "messages.1.tool_calls", MUST_FOLLOW),
        (
            [assistant(None, call("a"), call("b")), result("a", "")],
            "messages.1.tool_calls",
            MUST_FOLLOW,
        ),
        (
            [assistant(None, call("a")), result("a", ""), result("b", "")],
            "messages.3.tool_call_id",
            MUST_RESPOND,
        ),
        (
            [assistant(None, call("a")), result("a", ""), result("a", "")],
            "messages.3.tool_call_id",
            MUST_RESPOND,
        ),
        (
            [assistant(None, call("a"), call("a")), result("a", "")],
            "messages.1.tool_calls",
            "twice",
        ),
        (
            [assistant(None, call("a")), Message(role="tool", content="")],
            "messages.2",
            MUST_RESPOND,
        ),
    ],
)
def test_api_84_broken_tool_turns(tail, param, words):
    with pytest.raises(InvalidMessagesError, match=words) as caught:
        encode([user("q"), *tail], False)
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize(
    "arguments",
    [
        "{",
        "[]",
        "5",
        "null",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": ' + "9" * 5000 + "}",
        "[" * 10**5,
    ],
    ids=lambda text: text[:12],
)
def test_api_84_arguments_must_be_an_object(arguments):
    chat = [user("q"), assistant(None, ToolCall("a", "f", arguments)), result("a", "")]
    with pytest.raises(InvalidMessagesError, match="JSON") as caught:
        encode(chat, False)
    assert caught.value.param == "messages.1.tool_calls.0.function.arguments"


def test_api_84_empty_arguments_count_as_none():
    chat = [user("q"), assistant(None, ToolCall("a", "f", "")), result("a", "")]
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>' in encode(chat, False)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_api_26_null_content(role):
    chat = [user("q"), assistant(None, call("a")), result("a", "r")]
    assert "None" not in encode(chat, True)
    broken = Message(role=role, content=None, tool_call_id="a" if role == "tool" else None)
    chat = [*chat[:2], broken] if role == "tool" else [broken]
    with pytest.raises(InvalidMessagesError, match="null"):
        encode(chat, True)


def test_http_07_the_switch_changes_the_last_token_only():
    tokenizer = small_tokenizer()
    off, on = (tokenizer.encode_runs(encode_request([user("q")], (), t)) for t in (False, True))
    assert off[:-1] == on[:-1]
    assert [off[-1], on[-1]] == tokenizer.control_ids(["</think>", "<think>"])


def test_tool_literals_in_the_template_are_control_tokens():
    runs = tools_runs(TOOLS)
    assert sum(run == Control("｜DSML｜") for run in runs) == TOOLS_BLOCK.count("｜DSML｜") == 11
    assert prompt_text(runs).startswith(TOOLS_BLOCK)


hostile = st.sampled_from(
    [USER, ASSISTANT, "<think>", "</think>", "｜DSML｜", BOS, EOS, "a", ".\n"]
)
texts = st.lists(hostile, min_size=1, max_size=4).map("".join)


@given(texts, texts, texts, texts)
def test_control_literals_of_a_client_stay_text(system, question, argument, answer):
    tokenizer = small_tokenizer()
    chat = [
        Message(role="system", content=system),
        user(question),
        assistant(question, ToolCall("a", answer, json.dumps({argument: argument}))),
        result("a", answer),
    ]
    harmless = [
        Message(role="system", content="s"),
        user("q"),
        assistant("q", ToolCall("a", "n", json.dumps({"k": "v"}))),
        result("a", "r"),
    ]
    control = set(tokenizer.control.values())
    ids, wanted = (
        tokenizer.encode_runs(encode_request(c, (tool(c[1].content or ""),), True))
        for c in (chat, harmless)
    )
    assert [i for i in ids if i in control] == [i for i in wanted if i in control]


def test_long_tool_loops_take_linear_time():
    def seconds(turns: int) -> float:
        loop = [assistant(None, call("a")), result("a", "r")] * turns
        begin = time.process_time()
        encode([user("q"), *loop], True)
        return time.process_time() - begin

    small = min(seconds(100) for _ in range(3))
    assert seconds(2000) < 80 * small + 0.05
