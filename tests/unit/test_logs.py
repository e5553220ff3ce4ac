"""The JSON log: one object a line, request ids and counts, and nothing of what was said."""

import dataclasses
import io
import json
import logging

import pytest

from minidsa.configs.log_lines import JsonLines
from scripted_engine import EOS, server_config, serving

SECRET = "xyzzy-plugh"


@pytest.fixture
def lines():
    """What the server's loggers write as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines("server"))
    logger = logging.getLogger("minidsa")
    level, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.level = level
    assert SECRET not in stream.getvalue()


def json_config(**changes):
    config = server_config(**changes)
    engine = dataclasses.replace(config.engine, log_format="json")
    return dataclasses.replace(config, engine=engine)


async def test_each_request_that_generates_has_a_line_with_its_id_and_its_counts(lines):
    async with serving(lambda submit: [120, 121, EOS], config=json_config()) as bed:
        bed.engine.cached = 2
        headers = {"x-request-id": "mine"}
        for body in ({"prompt": SECRET}, {"prompt": SECRET, "stream": True}):
            assert (await bed.client.post("/v1/completions", json=body, headers=headers)).text
        assert (await bed.client.post("/v1/completions", json={"prompt": 5})).status_code == 400
        assert (await bed.client.get("/health")).status_code == 200
    whole, streamed = lines()
    for line in (whole, streamed):
        assert line["message"] == "request" and line["level"] == "info"
        assert (line["request_id"], line["route"], line["status"]) == (
            "mine",
            "/v1/completions",
            200,
        )
        assert (line["cached_tokens"], line["completion_tokens"]) == (2, 3)
        assert 0 <= line["first_token_seconds"] <= line["seconds"]
        assert line["finish_reasons"] == ["stop"]


async def test_a_text_log_has_no_such_lines(lines):
    async with serving(lambda submit: [120, EOS]) as bed:
        assert (await bed.client.post("/v1/completions", json={"prompt": SECRET})).text
    assert lines() == []


def test_an_exception_is_one_line():
    record = logging.LogRecord("a", logging.ERROR, "f", 1, 'it "%s"\nfailed', ("é",), None)
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    (line,) = JsonLines("engine").format(record).splitlines()
    told = json.loads(line)
    assert told["message"] == 'it "é"\nfailed' and told["process"] == "engine"
    assert "two\nlines" in told["exception"]
    assert told["time"].endswith("Z")
