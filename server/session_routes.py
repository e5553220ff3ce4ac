"""Save a cached prompt under a name, and bring it back: only where a folder is configured.

A session belongs to the API key and the salt that its rows were computed under; another key may
have one of the same name.
"""

import re

import msgspec
from fastapi import APIRouter, Request, Response

from ..scheduler.messages import Answer, RestoreSession, SaveSession
from .errors import ApiError, invalid_value, shown
from .protocol import Salt
from .running import JSON, read_when_ready, tenant_of
from .service import Service
from .side_protocol import PromptRequest
from .side_routes import prompt_ids
from .validation import RequestModel

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SaveSessionRequest(PromptRequest):
    """Body of POST /v1/sessions/{name}/save: the prompt whose rows are saved."""

    cache_salt: Salt = None


class RestoreSessionRequest(RequestModel):
    """Body of POST /v1/sessions/{name}/restore."""

    cache_salt: Salt = None


def session_routes(service: Service) -> APIRouter:
    """Both routes over one service."""
    router = APIRouter()

    async def save(request: Request, name: str) -> Response:
        body = await read_when_ready(service, request, SaveSessionRequest)
        service.check_model(body.fields.model)
        _check_name(name)
        ids = await prompt_ids(service, body)
        salt = body.fields.cache_salt or ""
        return _answer(
            name, await service.client.ask(SaveSession(name, ids, tenant_of(request), salt))
        )

    async def restore(request: Request, name: str) -> Response:
        body = await read_when_ready(service, request, RestoreSessionRequest)
        _check_name(name)
        question = RestoreSession(name, tenant_of(request), body.fields.cache_salt or "")
        return _answer(name, await service.client.ask(question))

    router.add_api_route("/v1/sessions/{name}/save", save, methods=["POST"])
    router.add_api_route("/v1/sessions/{name}/restore", restore, methods=["POST"])
    return router


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise invalid_value(
            "name",
            f"{shown(name)} is no name of a session: 1 to 64 letters, digits, dots, dashes and "
            "underscores, a letter or digit first",
        )


def _answer(name: str, answer: Answer) -> Response:
    if not answer.done:
        raise ApiError(409, answer.error, code="session_refused", param="name")
    body = {"session": name, "num_tokens": answer.num_tokens}
    return Response(msgspec.json.encode(body), media_type=JSON)
