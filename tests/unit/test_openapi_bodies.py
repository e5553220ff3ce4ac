"""The server under whatever its own OpenAPI document allows: an answer or a refusal, no fault."""

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openapi_bodies import bodies
from scripted_engine import serving

HI = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 20},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"input": "hi", "max_output_tokens": 20},
    "/tokenize": {"messages": HI},
    "/detokenize": {"tokens": [115]},
    "/abort": {"all": True},
}
"""A body that is answered, by route: half of those that are sent are changes of it."""


@cache
def document() -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        async with serving() as bed:
            return (await bed.client.get("/openapi.json")).json()

    return asyncio.run(read())


@cache
def changed_bodies(path: str) -> st.SearchStrategy[list[tuple[bool, Any]]]:
    drawn = st.tuples(st.booleans(), bodies(document(), path))
    return st.lists(drawn, min_size=12, max_size=12)


@pytest.mark.parametrize("path", PLAIN)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 5, deadline=None)
def test_api_101_no_body_of_the_openapi_document_makes_the_server_fail(path, data):
    async def send(sent: list[tuple[bool, Any]]) -> None:
        async with serving(burst=50) as bed:
            for changes, body in sent:
                if changes and isinstance(body, dict):
                    body = PLAIN[path] | body
                content = json.dumps(body).encode()
                headers = {"content-type": "application/json"}
                response = await bed.client.post(path, content=content, headers=headers)
                assert response.status_code in (200, 400, 404), response.text
                assert "internal_error" not in response.text
            assert bed.engine.num_running == 0

    asyncio.run(send(data.draw(changed_bodies(path))))
