"""POST /v1/messages and /v1/messages/count_tokens."""

import msgspec
from fastapi import APIRouter, Request, Response

from ..chat import encode_chat, prepare_chat
from ..generation import Plan
from ..readdress import readdressed
from ..running import JSON, read_when_ready, run_plan
from ..service import Service
from .answer import MessageRenderer
from .protocol import CountRequest, MessagesRequest
from .translation import to_chat


def messages_routes(service: Service) -> APIRouter:
    """Both routes over one service; this API's clients add query flags, which ask for nothing."""
    router = APIRouter()

    async def messages(request: Request) -> Response:
        body = await read_when_ready(service, request, MessagesRequest)
        chat_body, addresses = await to_chat(body)
        with readdressed(addresses):
            chat = await prepare_chat(service, chat_body)
        request_id = request.state.request_id
        answer_id = service.answer_id("msg_", request_id)
        renderer = MessageRenderer(
            answer_id,
            service.model_name,
            request_id,
            chat.prompt.call_key,
            chat.request.include_reasoning,
        )
        plan = Plan(answer_id, chat.choices, renderer)
        return await run_plan(service, request, plan, body.fields.stream)

    async def count_tokens(request: Request) -> Response:
        body = await read_when_ready(service, request, CountRequest)
        service.check_model(body.fields.model)
        chat_body, addresses = await to_chat(body)
        with readdressed(addresses):
            fields = chat_body.fields
            prompt = await encode_chat(service, chat_body, fields, fields.messages)
        return Response(msgspec.json.encode({"input_tokens": len(prompt.ids)}), media_type=JSON)

    router.add_api_route("/v1/messages", messages, methods=["POST"])
    router.add_api_route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
    return router
