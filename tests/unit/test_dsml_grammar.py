"""Calls written by their grammar are calls to the parser, and their arguments fit the schema."""

import json

import jsonschema
import pytest

from grammar_bed import VOCAB, control_id, params, small_compiler, walk
from minidsa.server.json_schema import SchemaRefused
from minidsa.server.parsers.dsml import DsmlContent
from minidsa.server.parsers.dsml_grammar import MARK, CallableTool, calls_grammar
from minidsa.server.parsers.events import CallArgs, CallEnd, CallStart, ContentText
from tokenizers_small import small_tokenizer

PATH = "/0/function/parameters"
SCHEMAS = {
    "strings": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"enum": ["c", "f", "k k"]},
            "note": {"type": ["string", "null"], "maxLength": 3},
        },
        "required": ["city"],
    },
    "values": {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 20},
            "list": {"type": "array", "items": {"enum": ["</a>", 2]}, "maxItems": 3},
            "on": {"type": "boolean"},
            "where": {"$ref": "#/$defs/spot"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "mode": {"anyOf": [{"const": "fast"}, {"type": "integer", "maximum": 3, "minimum": 1}]},
        },
        "required": ["list", "where"],
        "$defs": {
            "spot": {
                "type": "object",
                "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}},
                "required": ["x"],
            }
        },
        "additionalProperties": False,
    },
    "texts": {
        "type": "object",
        "properties": {"ref": {"$ref": "#/definitions/t"}, "lit": {"enum": [MARK, "a\nb", "1"]}},
        "required": ["ref", "lit"],
        "definitions": {"t": {"type": "string", "minLength": 1, "maxLength": 4}},
    },
    "optional": {
        "type": "object",
        "properties": {name: {"type": "null"} for name in ("a", "b", "ü c")},
    },
    "nothing": {"type": "object", "properties": {}},
    "closed": {"type": "object", "additionalProperties": False},
}


def tool(parameters, name="f") -> CallableTool:
    return CallableTool(name, parameters, PATH)


def grammar(*tools: CallableTool, many=False, forced=True) -> str:
    return calls_grammar(tools, control_id(MARK), many, forced)


def parse(text: str, tools) -> tuple[str, list[tuple[str, str]], bool]:
    """Content, calls, and whether the last call has its end."""
    parser = DsmlContent(
        [{"function": {"name": t.name, "parameters": t.parameters}} for t in tools]
    )
    content, calls, closed = "", [], False
    for event in [*parser.feed(text, 0), *parser.finish(False)]:
        match event:
            case ContentText(piece, _):
                content += piece
            case CallStart(_, name):
                calls.append((name, ""))
                closed = False
            case CallArgs(_, piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
            case CallEnd():
                closed = True
    return content, calls, closed


@pytest.mark.parametrize("name", SCHEMAS)
def test_api_75_arguments_fit_the_schema(name):
    schema = SCHEMAS[name]
    finished = 0
    for seed in range(12):
        text, done = walk(small_compiler().compile(grammar(tool(schema)), params()), seed)
        if done:
            finished += 1
            content, calls, closed = parse(text, [tool(schema)])
            assert (content, len(calls), closed) == ("", 1, True), text
            assert calls[0][0] == "f"
            jsonschema.validate(json.loads(calls[0][1]), schema)
    assert finished > 2


def test_api_77_several_calls_of_several_tools():
    tools = [tool(SCHEMAS["optional"], "f"), tool(SCHEMAS["nothing"], "g.h/i")]
    found = set()
    for seed in range(8):
        text, done = walk(small_compiler().compile(grammar(*tools, many=True), params()), seed)
        if done:
            content, calls, closed = parse(text, tools)
            assert content == "" and closed
            found |= {(name, len(calls)) for name, _ in calls}
    assert {name for name, _ in found} == {"f", "g.h/i"}
    assert max(count for _, count in found) > 1


def test_a_tool_without_a_schema_takes_any_arguments():
    for parameters in (None, {}, {"type": "object"}, {"type": "object", "description": "d"}):
        texts = [
            walk(small_compiler().compile(grammar(tool(parameters)), params()), seed, 300)
            for seed in range(6)
        ]
        for text, done in texts:
            if done:
                content, calls, closed = parse(text, [tool({})])
                assert (content, len(calls), closed) == ("", 1, True)
                assert isinstance(json.loads(calls[0][1]), dict)
        assert any(done for _, done in texts)


def test_text_may_stand_before_calls_that_are_not_forced():
    tools = [tool(SCHEMAS["optional"])]
    start = "Let me look: <b>\n\n<"
    matcher = small_compiler().compile(grammar(*tools, forced=False), params())
    matcher.accept(small_tokenizer(VOCAB).encode_runs([start]))
    mark = control_id(MARK)
    matcher.accept([mark])
    text, done = walk(matcher, 5)
    assert done and text.startswith("function_calls>\n<")
    content, calls, closed = parse(start + MARK + text, tools)
    assert content == "Let me look: <b>" and len(calls) == 1 and closed


def test_the_markup_of_the_format_is_met_exactly():
    """As the encoder writes a call into the history."""
    written = (
        f'\n\n<{MARK}function_calls>\n<{MARK}invoke name="f">\n'
        f'<{MARK}parameter name="city" string="true">Oslo</{MARK}parameter>\n'
        f'<{MARK}parameter name="note" string="false">null</{MARK}parameter>\n'
        f"</{MARK}invoke>\n</{MARK}function_calls>"
    )
    bare = f'\n\n<{MARK}function_calls>\n<{MARK}invoke name="f">\n\n</{MARK}invoke>\n'
    bare += f"</{MARK}function_calls>"
    full = small_tokenizer(VOCAB)
    for schema, text in ((SCHEMAS["strings"], written), (SCHEMAS["optional"], bare)):
        matcher = small_compiler().compile(grammar(tool(schema)), params())
        matcher.accept(full.encode_text(text, add_bos=False))
        assert matcher.is_complete, matcher.error


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, f"{PATH}/properties/a/not"),
        ({"type": "object", "properties": {'a"': {}}}, f'{PATH}/properties/a"'),
        ({"type": "object", "properties": {"a\n": {}}}, f"{PATH}/properties/a\n"),
        ({"type": "object", "properties": {"": {}}}, f"{PATH}/properties/"),
        ({"type": "object", "properties": {"a": False}}, f"{PATH}/properties/a"),
        ({"type": "object", "required": ["z"], "properties": {"a": {}}}, f"{PATH}/required"),
        ({"type": "array"}, f"{PATH}/type"),
        ({"anyOf": [{}]}, f"{PATH}/anyOf"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, f"{PATH}/properties/a/$ref"),
        ({"properties": {"a": {"$ref": "#"}}}, f"{PATH}/properties/a/$ref"),
    ],
)
def test_parameters_that_the_markup_cannot_hold_are_named(schema, pointer):
    with pytest.raises(SchemaRefused) as caught:
        grammar(tool(schema))
    assert caught.value.pointer == pointer
