"""Schemas: whatever a grammar lets through validates, and what cannot be followed is refused."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar_bed import params, small_compiler, walk
from minidsa.scheduler.grammar import GrammarError
from minidsa.server import lark
from minidsa.server.grammars import SPACE
from minidsa.server.json_schema import MAX_DEPTH, MAX_NODES, SchemaRefused, read_schema

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": -3, "maximum": 12},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["v"],
        }
    },
    "$ref": "#/$defs/node",
}
PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "description": "as pydantic writes it",
    "type": "object",
    "$defs": {
        "Kind": {"enum": ["a", "b\nc", "ü"], "title": "Kind", "type": "string"},
        "Place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "properties": {
        "kind": {"$ref": "#/$defs/Kind"},
        "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
        "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 130},
    },
    "required": ["kind", "age"],
}
CORPUS = {
    "empty": {},
    "object": {"type": "object"},
    "person": PERSON,
    "tree": TREE,
    "self": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": {"const": 1}},
        "required": ["n"],
    },
    "enum of everything": {
        "enum": ["x", 1, 2.5, None, True, {"k": [1, "y"]}, [], "日本", "😀\u0007"]
    },
    "const": {"const": {"a": [1, {"b": None}], "ü": '\\"'}},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["q"]}],
        "items": False,
        "minItems": 2,
    },
    "matrix": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}},
        "maxItems": 3,
    },
    "range": {"type": "integer", "minimum": -17, "maximum": 4203},
    "open range": {"type": "number", "exclusiveMinimum": -0.5, "maximum": 12.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "searched": {"type": "string", "pattern": "[a-c]{2}", "maxLength": 8},
    "anchored": {"type": "string", "pattern": "^\\d{3}-(x|yy)$"},
    "start": {"type": "string", "pattern": "^ab", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "types": {"type": ["string", "null", "integer"], "maxLength": 4, "maximum": 5},
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"t": {"const": "a"}, "x": {"type": "integer"}},
                "required": ["t", "x"],
            },
            {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"]},
        ],
        "discriminator": {"propertyName": "t"},
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "any beside properties": {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "anyOf": [{"required": ["a"]}, {"properties": {"c": {"type": "null"}}, "required": ["c"]}],
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "patterned keys": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "odd keys": {
        "type": "object",
        "properties": {"a/b": {"type": "null"}, 'q"~': {"enum": [0]}, "": {"enum": [1]}},
        "required": ["a/b", 'q"~', ""],
    },
    "definitions": {
        "definitions": {"s/t": {"enum": ["d"]}},
        "type": "array",
        "items": {"$ref": "#/definitions/s~1t"},
        "minItems": 1,
    },
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "far bounds": {"type": "number", "exclusiveMinimum": -1e300, "maximum": 2**64},
    "the last exact bound": {"type": "integer", "minimum": 2**53, "maximum": 2**60},
    "required only": {"type": "object", "required": ["z"], "maxProperties": 2},
    "no uniqueness": {"type": "array", "items": {"enum": [1]}, "uniqueItems": False},
}


def compiled(schema):
    rule = lark.json_text(read_schema(schema), whitespace_pattern=SPACE)
    return small_compiler().compile(f"start: {rule}", params())


@pytest.mark.parametrize("name", CORPUS)
def test_api_89_whatever_a_grammar_lets_through_validates(name):
    schema = CORPUS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = [text for seed in range(8) for text, done in [walk(compiled(schema), seed)] if done]
    assert texts, "no walk came to an end"
    for text in texts:
        validator.validate(json.loads(text))


def leaf():
    return st.one_of(
        st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
                  st.integers(-2000, 2000), st.integers(-2000, 2000)),
        st.lists(st.sampled_from(["a", "ß", "", 1, 0.5, None, False]), min_size=1).map(
            lambda values: {"enum": values}
        ),
        st.integers(0, 4).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 2}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    )  # fmt: skip


def grown(inner):
    names = st.sampled_from(["a", "b", "c c", "ü"])
    objects = st.builds(
        lambda properties, most: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:most],
        },
        st.dictionaries(names, inner, min_size=1, max_size=3),
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 3},
        inner, st.integers(0, 2),
    )  # fmt: skip
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=3).map(
        lambda options: {"anyOf": options}
    ))  # fmt: skip


@given(st.recursive(leaf(), grown, max_leaves=6), st.integers(0, 99))
def test_generated_schemas_let_only_valid_texts_through(schema, seed):
    text, done = walk(compiled(schema), seed)
    if done:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"uniqueItems": True}, "/uniqueItems"),
        ({"not": {}}, "/not"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "/properties/a/items/not"),
        ({"if": {}, "then": {}, "else": {}}, "/if"),
        ({"contains": {}}, "/contains"),
        ({"dependentRequired": {}}, "/dependentRequired"),
        ({"propertyNames": {}}, "/propertyNames"),
        ({"unevaluatedProperties": False}, "/unevaluatedProperties"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance"),
        ({"frobnicate": 1}, "/frobnicate"),
        ({"nullable": True}, "/nullable"),
        ({"type": "strnig"}, "/type"),
        ({"type": []}, "/type"),
        ({"type": ["string", 5]}, "/type"),
        ({"$ref": "https://example.com/a"}, "/$ref"),
        ({"$ref": "other.json#/a"}, "/$ref"),
        ({"$ref": "#/$defs/missing"}, "/$ref"),
        ({"anyOf": [{"$ref": "#/description"}], "description": "d"}, "/anyOf/0/$ref"),
        ({"anyOf": []}, "/anyOf"),
        ({"anyOf": {}}, "/anyOf"),
        ({"anyOf": [{}, 5]}, "/anyOf/1"),
        ({"properties": []}, "/properties"),
        ({"properties": {"a/b~": {"enum": []}}}, "/properties/a~1b~0/enum"),
        ({"items": [{}]}, "/items"),
        ({"minLength": -1}, "/minLength"),
        ({"maxItems": 10**18}, "/maxItems"),
        ({"maxItems": True}, "/maxItems"),
        ({"minimum": "1"}, "/minimum"),
        ({"exclusiveMinimum": True}, "/exclusiveMinimum"),
        ({"minimum": 2**53 + 1}, "/minimum"),
        ({"exclusiveMinimum": 1e300}, "/exclusiveMinimum"),
        ({"maximum": -(2**64)}, "/maximum"),
        ({"exclusiveMaximum": -1e300}, "/exclusiveMaximum"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"multipleOf": 1234567}, "/multipleOf"),
        ({"pattern": "a" * 5000}, "/pattern"),
        ({"required": "a"}, "/required"),
        ({"enum": list(range(10**5))}, "/enum"),
    ],
)
def test_api_92_the_part_that_cannot_be_followed_is_named(schema, pointer):
    with pytest.raises(SchemaRefused) as caught:
        read_schema(schema)
    assert caught.value.pointer == pointer


def test_huge_and_deep_schemas_are_refused_before_anything_is_compiled():
    deep: object = {"type": "integer"}
    for _ in range(MAX_DEPTH - 1):
        deep = {"items": deep}
    read_schema({"items": deep})
    with pytest.raises(SchemaRefused, match="nest deeper"):
        read_schema({"items": {"items": deep}})
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(SchemaRefused, match="nest deeper"):
        read_schema(deep)
    with pytest.raises(SchemaRefused, match=f"more than {MAX_NODES}"):
        read_schema({"properties": {f"p{i}": {} for i in range(MAX_NODES)}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "string", "pattern": "("},
        {"type": "string", "format": "no-such-format"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
    ],
)
def test_what_the_grammar_engine_cannot_follow_it_refuses_itself(schema):
    schema = {"type": "object"} | schema
    with pytest.raises(GrammarError):
        compiled(schema)


def test_objects_that_list_their_keys_are_closed_where_that_is_safe():
    listed = {"properties": {"a": {}}}
    assert read_schema(listed)["additionalProperties"] is False
    for kept in (
        listed | {"additionalProperties": True},
        listed | {"required": ["b"]},
        listed | {"patternProperties": {"^x": {}}},
        listed | {"anyOf": [{}]},
    ):
        assert read_schema(kept).get("additionalProperties") is not False
    inside = read_schema({"allOf": [listed, {"properties": {"b": {}}}]})
    assert "additionalProperties" not in inside["allOf"][0]
