"""Request bodies out of an OpenAPI document: most of them fit it, some of them nearly."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

REF = "#/components/schemas/"
ODD = st.sampled_from([None, True, -1, 0, 1.5, 2**70, "", "x", "\ud800", [], [[]], {}, {"": 0}])
BOUND = 2**63


def bodies(document: Mapping[str, Any], path: str) -> st.SearchStrategy[Any]:
    """Bodies for POST to a path of the document; required fields may be missing too."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return _values(content["application/json"]["schema"], document["components"]["schemas"])


def _values(schema: Mapping[str, Any], known: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    fitting = st.deferred(lambda: _fitting(schema, known))
    return st.integers(0, 29).flatmap(lambda number: fitting if number else ODD)


def _fitting(schema: Mapping[str, Any], known: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return _fitting(known[schema["$ref"].removeprefix(REF)], known)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return st.one_of([_values(option, known) for option in options])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            return _objects(schema, known)
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(_values(schema.get("items", {}), known), min_size=least, max_size=3)
        case kind:
            return _plain(kind, schema)


def _plain(kind: str | None, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    match kind:
        case "string":
            return st.text(max_size=8)
        case "integer":
            low, high = schema.get("minimum", -BOUND), schema.get("maximum", BOUND - 1)
            return st.integers(max(low, -9), min(high, 9)) | st.integers(low, high)
        case "number":
            return st.floats(schema.get("minimum", 0), schema.get("maximum", 1))
        case "boolean":
            return st.booleans()
        case _:
            return ODD


def _objects(schema: Mapping[str, Any], known: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    fields = {name: _values(field, known) for name, field in schema.get("properties", {}).items()}
    needed = set(schema.get("required", ()))

    def some(names: set[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({name: fields[name] for name in sorted(names | needed)})

    if not fields:
        return st.dictionaries(st.text(max_size=3), ODD, max_size=2)
    whole = st.sets(st.sampled_from(sorted(fields)), max_size=3).flatmap(some)
    odd = st.dictionaries(st.sampled_from(sorted(fields)), ODD, max_size=2)
    return st.integers(0, 9).flatmap(lambda number: whole if number else odd)
