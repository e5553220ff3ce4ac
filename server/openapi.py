"""The OpenAPI document: FastAPI's routes, with the bodies and errors of their handlers.

Handlers parse bodies themselves, so FastAPI cannot know their models; they are put in here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .chat_protocol import ChatRequest
from .messages_api.protocol import CountRequest, MessagesRequest
from .protocol import CompletionRequest
from .responses_api.protocol import ResponsesRequest
from .session_routes import RestoreSessionRequest, SaveSessionRequest
from .side_protocol import AbortRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_BODIES: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        "/chat/completions": ChatRequest,
        "/completions": CompletionRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
        "/sessions/{name}/save": SaveSessionRequest,
        "/sessions/{name}/restore": RestoreSessionRequest,
        "/abort": AbortRequest,
        "/responses": ResponsesRequest,
        "/messages": MessagesRequest,
        "/messages/count_tokens": CountRequest,
    }
)
_FAILURES: Mapping[str, str] = MappingProxyType(
    {
        "400": "The request is wrong or asks for what is not supported; the message names it",
        "401": "The API key is missing or wrong",
        "404": "There is no such model, request or route",
        "408": "The body did not arrive in time",
        "413": "The body is too large",
        "415": "The body is not plain application/json",
        "429": "The key is over one of its limits",
        "500": "The server failed",
        "503": "The server is loading, full, shutting down or dead",
    }
)
_TEXT_OR_NULL = MappingProxyType({"anyOf": [{"type": "string"}, {"type": "null"}]})


def describe_api(app: FastAPI) -> bytes:
    """The document as JSON."""
    document = get_openapi(title="minidsa", version="1", routes=app.routes)
    _, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES.values()], ref_template=_REF
    )
    document["components"] = {"schemas": {**definitions["$defs"], "Error": _error_schema()}}
    for path, item in document["paths"].items():
        for operation in item.values():
            _complete(operation, path)
    return msgspec.json.encode(document)


def _complete(operation: dict[str, Any], path: str) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    model = _BODIES.get(path.removeprefix("/v1"))
    if model is not None:
        schema = {"$ref": _REF.format(model=model.__name__)}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for status, text in _FAILURES.items():
        responses[status] = {"description": text, "content": error}


def _error_schema() -> dict[str, Any]:
    keys = {"message": {"type": "string"}, "type": {"type": "string"}}
    nullable = {"param": dict(_TEXT_OR_NULL), "code": dict(_TEXT_OR_NULL)}
    inner = {
        "type": "object",
        "properties": keys | nullable,
        "required": ["message", "type", "param", "code"],
    }
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
