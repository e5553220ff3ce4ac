"""The routes that run the model: both generating ones and the abort of what they started."""

import re

from fastapi import APIRouter, Request, Response

from .bodies import read_body
from .chat import prepare_chat
from .chat_answer import ChatRenderer
from .chat_protocol import ChatRequest
from .completion_answer import CompletionRenderer
from .completions import prepare_completion
from .errors import ApiError, invalid_value
from .generation import Plan
from .openai_stream import OpenAIStream
from .protocol import CompletionRequest
from .running import JSON, handling_of, read_when_ready, run_plan, tenant_of
from .service import Service
from .side_protocol import AbortRequest


def generating_routes(service: Service) -> APIRouter:
    """Chat, completions and abort over one service."""
    router = APIRouter()

    async def chat(request: Request) -> Response:
        prepared = await prepare_chat(service, await read_when_ready(service, request, ChatRequest))
        fields, answer_id = prepared.request, _answer_id(service, request, "chatcmpl-")
        objects = ChatRenderer(service, fields, prepared.prompt, answer_id)
        renderer = OpenAIStream(objects, fields.stream_options)
        plan = Plan(answer_id, prepared.choices, renderer, handling=handling_of(service, fields))
        return await run_plan(service, request, plan, fields.stream)

    async def completions(request: Request) -> Response:
        body = await read_when_ready(service, request, CompletionRequest)
        prepared = await prepare_completion(service, body)
        fields, answer_id = prepared.request, _answer_id(service, request, "cmpl-")
        objects = CompletionRenderer(service, fields, prepared.prompts, answer_id)
        renderer = OpenAIStream(objects, fields.stream_options)
        num_prompts, handling = len(prepared.prompts), handling_of(service, fields)
        plan = Plan(answer_id, prepared.choices, renderer, num_prompts, handling)
        return await run_plan(service, request, plan, fields.stream)

    async def abort(request: Request) -> Response:
        body = (await read_body(request, service.config, AbortRequest)).fields
        if body.all == (body.request_id is not None):
            raise invalid_value("request_id", "give either request_id or all, and not both")
        # Another key's requests are as good as not there.
        own = [
            generation
            for generation in service.generations.values()
            if generation.plan.handling.tenant == tenant_of(request)
        ]
        found = [
            generation
            for generation in own
            if body.all
            or body.request_id in (generation.plan.id, _without_prefix(generation.plan.id))
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


def _without_prefix(answer_id: str) -> str:
    """The client's own id, where it gave one."""
    return re.split("[-_]", answer_id, maxsplit=1)[1]


def encode_count(aborted: int) -> bytes:
    return b'{"aborted":%d}' % aborted


def _answer_id(service: Service, request: Request, prefix: str) -> str:
    return service.answer_id(prefix, request.state.request_id)
