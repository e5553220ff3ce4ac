"""A model's text to fields: the same for every split, nothing lost, calls streamed forward only."""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidsa.server.chat_encoding import encode_messages
from minidsa.server.chat_messages import Message, ToolCall
from minidsa.server.parsers.dsml import DsmlContent
from minidsa.server.parsers.events import (
    CallArgs,
    CallEnd,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
    merge_events,
)
from minidsa.server.parsers.reasoning import OutputParser, PlainContent
from minidsa.server.prompt_runs import prompt_text

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "flag": {"type": "boolean"},
    "either": {"type": ["integer", "string"]},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}
]
OPEN, CLOSE = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
END = "</｜DSML｜invoke>"


def parser(start: Any = "content", tools=TOOLS, **options) -> OutputParser:
    return OutputParser(start, DsmlContent(tools) if tools else PlainContent(), **options)


def parse(text, start="content", tools=TOOLS, cut=False, pieces=None, **options) -> list[Event]:
    machine = parser(start, tools, **options)
    events = [event for piece in pieces or [text] for event in machine.feed(piece)]
    return merge_events(events + machine.finish(cut))


def content(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ContentText))


def reasoning(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ReasoningText))


def calls(events: list[Event]) -> list[tuple[str, str, bool]]:
    """Name, arguments, and whether the call was ended, in order."""
    ended = {e.index for e in events if isinstance(e, CallEnd)}
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallArgs):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    starts = [e for e in events if isinstance(e, CallStart)]
    assert [e.index for e in starts] == list(range(len(starts)))
    return [(e.name, arguments.get(e.index, ""), e.index in ended) for e in starts]


def parameter(name: str, value: str, is_text: bool = True) -> str:
    kind = str(is_text).lower()
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>'


def invoke(*parameters: str, name: str = "f") -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(parameters) + f"\n{END}"


def block(*invokes: str) -> str:
    return f"\n\n{OPEN}\n" + "\n".join(invokes) + f"\n{CLOSE}"


FRAGMENTS = [
    *("a", "\n", "\n\n", " ", "</think>", "<think>", "<", "｜DSML｜", '">', "{", '{"a": 1}', "\\"),
    *(
        OPEN,
        CLOSE,
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f">',
        END,
    ),
    *('<｜DSML｜invoke name="', '<｜DSML｜parameter name="', '<｜DSML｜parameter name="text">'),
    *('<｜DSML｜parameter name="text" string="true">', "</｜DSML｜parameter>"),
    *('<｜DSML｜parameter name="count" string="true">', "5", "true", "🙂"),
    *(block(invoke(parameter("text", "x"))), block(invoke(parameter("n", "5", False)))),
]
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(outputs, st.sampled_from(["reasoning", "content"]), st.booleans(), st.data())
def test_api_78_any_split_gives_the_events_of_the_whole(text, start, cut, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    options = {"start": start, "cut": cut, "separate": data.draw(st.booleans())}
    whole = parse(text, **options)
    assert parse(text, pieces=pieces, **options) == whole
    assert parse(text, pieces=list(text), **options) == whole


@given(outputs, st.booleans())
def test_shown_text_is_verbatim_and_ended_calls_are_json(text, cut):
    events = parse(text, cut=cut)
    for event in events:
        if isinstance(event, ContentText | ReasoningText):
            assert text[event.start : event.start + len(event.text)] == event.text
    for _, arguments, ended in calls(events):
        assert not ended or isinstance(json.loads(arguments), dict)


@given(outputs)
def test_api_81_without_tools_markup_is_text(text):
    events = parse(text, tools=())
    assert content(events) == text.removeprefix("</think>")
    assert not calls(events)


def test_api_63_thoughts_and_answer_are_parted():
    assert parse("a</think>b", "reasoning") == [ReasoningText("a", 0), ContentText("b", 9)]


def test_api_65_thoughts_come_before_the_answer_at_every_split():
    text = "thought</think>answer"
    for i in range(len(text)):
        events = parse(text, "reasoning", pieces=[text[:i], text[i:]])
        assert (reasoning(events), content(events)) == ("thought", "answer")


def test_api_64_cut_while_thinking():
    assert parse("thinking </thi", "reasoning", cut=True) == [ReasoningText("thinking </thi", 0)]


@pytest.mark.parametrize("text", ["</think>answer", "answer"])
@pytest.mark.parametrize("start", ["reasoning", "content"])
def test_http_06_the_answer_after_a_tool_result_is_content(text, start):
    assert content(parse(text, start)) == "answer"


def test_a_marker_inside_the_answer_is_text():
    assert content(parse("a</think>b")) == "a</think>b"


def test_thoughts_left_in_the_content_keep_their_marker():
    events = parse("a</think>b", "reasoning", separate=False)
    assert events == [ReasoningText("a", 0), ContentText("</think>b", 1)]
    assert parse("a", "reasoning", separate=False) == [ReasoningText("a", 0)]


def test_a_model_may_open_its_thoughts_where_the_prompt_does_not():
    events = parse("<think>a</think>b", may_open=True)
    assert (reasoning(events), content(events)) == ("a", "b")
    assert content(parse("<think>a</think>b")) == "<think>a</think>b"


def test_newlines_before_a_call_are_its_own():
    events = parse("text\n\n\n" + block(invoke(parameter("text", "x"))).lstrip("\n"))
    assert content(events) == "text\n"
    assert calls(events) == [("f", '{"text": "x"}', True)]
    assert content(parse("text\n\n")) == "text\n\n"


def test_api_77_two_calls_of_a_block():
    events = parse(block(invoke(parameter("text", "x")), invoke(name="g")))
    assert calls(events) == [("f", '{"text": "x"}', True), ("g", "{}", True)]
    assert content(events) == ""


def test_api_80_a_call_without_parameters():
    assert calls(parse(block(invoke()))) == [("f", "{}", True)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("5", 5), ("7.5", 7.5), ("true", True), ("null", None), (" [1, 2] ", [1, 2])),
        *(('{"a": "b"}', {"a": "b"}), ("{broken", "{broken"), ("NaN", "NaN"), ("", "")),
        *(("[" * 100_000, "[" * 100_000), ("9" * 5000, "9" * 5000)),
    ],
    ids=lambda value: str(value)[:12],
)
def test_api_79_json_values_keep_their_type(text, value):
    ((_, arguments, ended),) = calls(parse(block(invoke(parameter("v", text, is_text=False)))))
    assert ended
    assert json.loads(arguments) == {"v": value}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("count", "5", 5), ("count", "5.5", "5.5"), ("count", "true", "true")),
        *(("ratio", "5", 5), ("ratio", "0.5", 0.5), ("flag", "true", True), ("flag", "1", "1")),
        *(("either", "5", "5"), ("text", "5", "5"), ("unknown", "5", "5"), ("count", "", "")),
    ],
)
def test_texts_become_scalars_where_the_schema_asks(name, text, value):
    ((_, arguments, _),) = calls(parse(block(invoke(parameter(name, text)))))
    assert json.loads(arguments) == {name: value}


def test_unknown_functions_are_passed_on():
    events = parse(block(invoke(parameter("count", "5"), name="nobody")))
    assert calls(events) == [("nobody", '{"count": "5"}', True)]


def test_a_parameter_given_twice_is_written_twice():
    events = parse(block(invoke(parameter("text", "a"), parameter("text", "b"))))
    assert calls(events)[0][1] == '{"text": "a", "text": "b"}'


def test_a_json_object_as_the_whole_body():
    body = '<｜DSML｜invoke name="f">\n{"a": [1, {"b": null}]}\n</｜DSML｜invoke>'
    assert calls(parse(block(body))) == [("f", '{"a": [1, {"b": null}]}', True)]


def test_http_04_long_arguments_arrive_in_pieces():
    value = 'line "quoted" \\ \n\t🙂 </｜DSML｜para ' * 130
    text = block(invoke(parameter("text", value)))
    machine = parser()
    events = [event for character in text for event in machine.feed(character)]
    assert sum(isinstance(event, CallArgs) for event in events) > 1000
    assert calls(events + machine.finish(False)) == calls(parse(text))
    assert json.loads(calls(events)[0][1]) == {"text": value}


def test_text_behind_a_block():
    text = block(invoke())
    assert content(parse(text + "\n \n")) == ""
    assert content(parse(text + "\n more")) == "\n more"
    assert len(calls(parse(text + text))) == 2


def test_a_missing_end_is_supplied_when_the_model_stopped():
    text = block(invoke(parameter("text", "x")))
    for end in (CLOSE, f"\n{END}\n{CLOSE}", f"\n{CLOSE}"):
        assert calls(parse(text.removesuffix(end))) == [("f", '{"text": "x"}', True)]
    torn = text[: text.index(">x") + 2]
    assert calls(parse(torn)) == [("f", '{"text": "x"}', True)]


def test_a_call_that_is_cut_never_looks_complete():
    text = block(invoke(parameter("text", "x"), parameter("v", "[1, 2]", False)))
    first, last = text.index("string="), text.index(END)
    for i in range(first + len('string="true">'), last):
        ((name, arguments, ended),) = calls(parse(text[:i], cut=True))
        assert name == "f" and not ended
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)


@pytest.mark.parametrize("wrapper", [("", ""), ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")])
def test_http_05_other_wrappers_are_calls_too(wrapper):
    text = wrapper[0] + invoke(parameter("text", "x")) + wrapper[1]
    assert calls(parse(text)) == [("f", '{"text": "x"}', True)]
    assert content(parse(text)) == ""


SHAPES = [
    "\n\n" + wrapper + "\n" + name_tag + body + closing
    for wrapper in (OPEN, "<｜DSML｜calls>", "<｜DSML｜function_calls", "", "<function_calls>")
    for name_tag in ('<｜DSML｜invoke name="f">', "<｜DSML｜invoke>", '<invoke name="f">', "")
    for body in (
        "\n" + parameter("text", "KEPT") + "\n",
        '{"text": "KEPT"}',
        "KEPT",
        '<｜DSML｜parameter name="text">KEPT</｜DSML｜parameter>',
        '<｜DSML｜parameter name="text" string="true">KEPT',
    )
    for closing in (f"{END}\n{CLOSE}", END, CLOSE, "", "</｜DSML｜invo")
]


@pytest.mark.parametrize("cut", [False, True])
def test_http_05_every_shape_is_a_call_or_text(cut):
    assert len(SHAPES) == 500
    for shape in SHAPES:
        events = parse(shape, cut=cut)
        in_calls = any("KEPT" in arguments for _, arguments, _ in calls(events))
        assert in_calls != ("KEPT" in content(events)), shape
        if not calls(events):
            assert content(events) == shape


def test_http_05_truncation_at_every_character_loses_no_text():
    text = "hello" + block(invoke(parameter("text", "value"), parameter("v", "5", False)))
    for i in range(len(text)):
        events = parse(text[:i])
        shown = content(events) + "".join(arguments for _, arguments, _ in calls(events))
        assert "hello"[: min(i, 5)] in shown
        assert ("value" in shown) == ("value" in text[:i])


def test_http_03_another_family_s_markup_passes_whole():
    text = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": {"b": 1}}<｜tool▁call▁end｜>'
    assert parse(text) == [ContentText(text, 0)]


@pytest.mark.parametrize(
    "unit",
    [
        *("<", "\n", "<｜DSML｜", OPEN, OPEN + "\n", '<｜DSML｜invoke name="', "</think>", " "),
        *(block(invoke()), block(invoke(parameter("v", "[", False))), parameter("text", "x")),
    ],
    ids=lambda unit: repr(unit[:24]),
)
@pytest.mark.parametrize("prefix", ["", OPEN + '<｜DSML｜invoke name="f">{', OPEN])
def test_http_05_time_is_linear(unit, prefix):
    """Ten times the text may not take much more than ten times as long, by pieces or whole."""

    def seconds(size: int, step: int) -> float:
        text = prefix + unit * (size // len(unit))
        machine = parser()
        begin = time.process_time()
        for i in range(0, len(text), step):
            machine.feed(text[i : i + step])
        machine.finish(False)
        return time.process_time() - begin

    for step in (3, 1 << 30):
        small = min(seconds(4_000, step) for _ in range(2))
        assert seconds(40_000, step) < 40 * small + 0.05


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet="ab\n\"'\\{<é🙂", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz"), inner, max_size=3),
    max_leaves=6,
)
argument_objects = st.dictionaries(st.text("abc é", min_size=1), json_values, max_size=4)


@given(st.lists(argument_objects, min_size=1, max_size=3), st.sampled_from(["", "Text.", "a\n"]))
def test_what_the_encoder_writes_is_read_back(objects, text):
    tool_calls = tuple(
        ToolCall(f"c{i}", f"g{i}", json.dumps(arguments)) for i, arguments in enumerate(objects)
    )
    turn = Message(role="assistant", content=text, reasoning="R", tool_calls=tool_calls)
    runs = encode_messages([Message(role="user", content="q"), turn], thinking=True)
    written = prompt_text(runs).split("<think>")[1].removesuffix("<｜end▁of▁sentence｜>")
    events = parse(written, "reasoning")
    assert (reasoning(events), content(events)) == ("R", text)
    assert [(name, json.loads(args)) for name, args, _ in calls(events)] == [
        (f"g{i}", arguments) for i, arguments in enumerate(objects)
    ]
