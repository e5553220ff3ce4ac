"""The HTTP application: routes, errors in one shape, and the gate before them.

Handlers get the request and return a response; bodies are read by `bodies.py` and validated by the
models of `protocol.py`, so FastAPI routes and describes, but does not parse.
"""

import asyncio
import functools
import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .answer_log import AnswerLog
from .errors import ApiError, internal
from .gate import CLIENT_GONE, Gate
from .generating_routes import generating_routes
from .messages_api.errors import shaped_body
from .messages_api.routes import messages_routes
from .openapi import describe_api
from .page import page_routes
from .profile_routes import profile_routes
from .responses_api.routes import responses_routes
from .service import Service
from .session_routes import session_routes
from .side_routes import side_routes
from .sse import ClientGone

_log = logging.getLogger(__name__)


def create_app(service: Service) -> ASGIApp:
    """The application over a service, gate included."""
    app = FastAPI(
        title="minidsa", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(generating_routes(service))
    app.include_router(messages_routes(service))
    app.include_router(responses_routes(service))
    app.include_router(side_routes(service))
    if service.config.engine.cache.session_dir is not None:
        app.include_router(session_routes(service))
    if service.config.engine.profile_dir is not None:
        app.include_router(profile_routes(service))
    app.include_router(page_routes())
    # Most servers are never asked for it, and it takes longer to make than all of the rest.
    description = functools.cache(functools.partial(describe_api, app))

    async def openapi() -> Response:
        return Response(await asyncio.to_thread(description), media_type="application/json")

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _fault)
    log = AnswerLog(service.metrics, service.config.engine.log_format == "json", service.tracing)
    gate = Gate(app, service.keyring, log.note)
    origins = service.config.cors_origins.replace(",", " ").split()
    if not origins:
        return gate
    # Outside the gate: a browser asks whether it may ask before it shows its key.
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )


def _response(request: Request, error: ApiError) -> Response:
    body = shaped_body(error, request.url.path, request.state.request_id)
    return Response(body, error.status, error.headers, "application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    return _response(request, error if isinstance(error, ApiError) else internal())


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    if not isinstance(error, HTTPException):
        return _response(request, internal())
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = f"{error.detail}: {request.method} {request.url.path[:64]!a}"
    code = codes.get(error.status_code)
    return _response(
        request, ApiError(error.status_code, message, code=code, headers=error.headers)
    )


async def _client_gone(request: Request, error: Exception) -> Response:
    request.state.client_gone = True
    return Response(status_code=CLIENT_GONE)


async def _fault(request: Request, error: Exception) -> Response:
    return _response(request, internal())
