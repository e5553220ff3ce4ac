"""Strict JSON and errors in one shape."""

import json

import pytest

from minidsa.server.errors import (
    ApiError,
    context_length_exceeded,
    model_not_found,
    overloaded,
    shown,
)
from minidsa.server.strict_json import MAX_DEPTH, read_object


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_object(body)
    assert caught.value.status == 400
    return caught.value


def test_a_body_has_four_keys_and_a_type_by_status():
    client = json.loads(ApiError(400, "m", code="c", param="p").body())
    assert client == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}
    }
    server = json.loads(overloaded("busy").body())
    assert server["error"]["type"] == "server_error"
    assert server["error"]["param"] is None
    assert overloaded("busy").headers == {"retry-after": "1"}


def test_texts_that_clients_match():
    error = context_length_exceeded("messages", 4096, "5000", 7)
    assert "This model's maximum context length is 4096 tokens" in error.message
    assert "5000" in error.message and "7" in error.message
    assert error.code == "context_length_exceeded"
    assert "'served'" in model_not_found("other", "served").message


def test_values_are_shown_escaped_and_cut():
    long, odd = "x" * 10**6, "\r\n\x1b[31m\ud800"
    for value in (long, odd, [1] * 1000, [long], {"a": 1}, 10**5000, -(10**50), None, 1.5):
        text = shown(value)
        assert len(text) <= 64
        assert text.isascii() and text.isprintable()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"x"', b"1", b"null", b"{", b"{'a': 1}", b'{"a": 1,}', b"\xff", b"{}x"]
)
def test_api_49_only_an_object_is_a_body(body):
    assert refusal(body).code == "invalid_json"


def test_http_19_a_key_given_twice_is_named():
    error = refusal(b'{"a": 1, "n": 1, "n": 2}')
    assert (error.param, error.code) == ("n", "invalid_json")
    assert "twice" in refusal(b'{"m": [{"x": {"k": 1, "k": 1}}]}').message


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_abu_01_numbers_that_are_not_finite_are_named(literal):
    assert refusal(b'{"a": [0, {"b": %s}]}' % literal.encode()).param == "a.1.b"


def test_abu_03_an_integer_of_5000_digits_is_named():
    assert refusal(b'{"a": {"n": ' + b"9" * 5000 + b"}}").param == "a.n"
    assert refusal(b'{"n": -' + b"9" * 5000 + b"}").param == "n"


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1000, 100_000, 1_000_000])
@pytest.mark.parametrize("kind", ["lists", "objects"])
def test_abu_10_nesting_has_a_bound(kind, depth):
    if kind == "lists":
        body = b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    else:
        body = b'{"a": ' * (depth - 1) + b"{}" + b"}" * (depth - 1)
    assert "nested deeper" in refusal(body).message


def test_abu_10_nesting_up_to_the_bound_passes():
    body = b'{"a": ' * (MAX_DEPTH - 1) + b"{}" + b"}" * (MAX_DEPTH - 1)
    assert read_object(body)


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "x\\udfffy", "\\uDBFF"])
def test_abu_12_half_a_surrogate_pair_is_named(half):
    assert refusal(b'{"a": ["%s"]}' % half.encode()).param == "a.0"
    assert "surrogate" in refusal(b'{"a": {"%s": 1}}' % half.encode()).message


def test_abu_12_other_odd_text_passes():
    assert read_object(b'{"a": "\\u0000\\ud83d\\ude00\x7f"}') == {"a": "\0😀\x7f"}
    assert refusal(b"\xef\xbb\xbf{}").code == "invalid_json"
    assert refusal('{"a": 1}'.encode("utf-16")).code == "invalid_json"
