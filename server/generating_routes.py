"""The routes that run the model: both generating ones and the abort of what they started."""

from typing import Any

from fastapi import APIRouter, Request, Response

from .answers import encode
from .bodies import read_document
from .chat import plan_chat
from .chat_protocol import AbortRequest, ChatRequest
from .completions import plan_completion
from .engine_client import Health
from .errors import ApiError, invalid_value, unavailable
from .generation import Plan, chunks, whole_answer
from .protocol import CompletionRequest
from .service import Service
from .sse import EventStream, events, while_connected
from .validation import validate

JSON = "application/json"


def generating_routes(service: Service) -> APIRouter:
    """Chat, completions and abort over one service."""
    router = APIRouter()

    async def chat(request: Request) -> Response:
        document = await _document(service, request)
        body = validate(ChatRequest, document)
        plan = await plan_chat(service, body, document, _answer_id(service, request, "chatcmpl"))
        return await _run(service, request, plan, body.stream)

    async def completions(request: Request) -> Response:
        document = await _document(service, request)
        body = validate(CompletionRequest, document)
        plan = await plan_completion(service, body, _answer_id(service, request, "cmpl"))
        return await _run(service, request, plan, body.stream)

    async def abort(request: Request) -> Response:
        document = await read_document(request, service.config.limits)
        body = validate(AbortRequest, document)
        if body.all == (body.request_id is not None):
            raise invalid_value("request_id", "give either request_id or all, and not both")
        found = [
            generation
            for generation in service.generations.values()
            if body.all
            or body.request_id in (generation.plan.id, generation.plan.id.partition("-")[2])
        ]
        if not found and not body.all:
            raise ApiError(404, "No request with this id is in flight", code="request_not_found")
        for generation in found:
            generation.abort()
        return Response(encode_count(len(found)), media_type=JSON)

    for path in ("/v1/chat/completions", "/chat/completions"):
        router.add_api_route(path, chat, methods=["POST"], name=f"chat {path}")
    for path in ("/v1/completions", "/completions"):
        router.add_api_route(path, completions, methods=["POST"], name=f"completions {path}")
    router.add_api_route("/abort", abort, methods=["POST"])
    return router


def encode_count(aborted: int) -> bytes:
    return b'{"aborted":%d}' % aborted


async def _document(service: Service, request: Request) -> dict[str, Any]:
    health = service.client.health
    if health is not Health.READY:
        raise unavailable(health.value)
    return await read_document(request, service.config.limits)


def _answer_id(service: Service, request: Request, prefix: str) -> str:
    return service.answer_id(prefix, request.state.request_id)


async def _run(service: Service, request: Request, plan: Plan, stream: bool) -> Response:
    generation = service.launch(plan)
    if stream:
        return EventStream(events(chunks(generation)), lambda: service.land(generation))
    try:
        answer = await while_connected(request.receive, whole_answer(generation))
    finally:
        service.land(generation)
    return Response(encode(answer), media_type=JSON)
