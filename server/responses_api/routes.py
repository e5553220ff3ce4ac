"""POST /v1/responses, and the stored ones: reading, listing what they were asked, deleting."""

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from ..blocks import Block
from ..bodies import Body
from ..chat import prepare_chat
from ..errors import ApiError, shown, unsupported
from ..generation import Plan
from ..readdress import readdressed
from ..running import JSON, read_when_ready, run_plan
from ..service import Service
from .answer import Keep, ResponseRenderer
from .protocol import ResponsesRequest
from .store import ResponseStore, Stored
from .translation import Translated, answer_turn, to_chat

_PATH = "/v1/responses"


def responses_routes(service: Service) -> APIRouter:
    """All of them over one service and one store."""
    routes = _Responses(service)
    router = APIRouter()
    router.add_api_route(_PATH, routes.create, methods=["POST"])
    router.add_api_route(f"{_PATH}/{{response_id}}", routes.read, methods=["GET"])
    router.add_api_route(f"{_PATH}/{{response_id}}", routes.delete, methods=["DELETE"])
    router.add_api_route(f"{_PATH}/{{response_id}}/input_items", routes.items, methods=["GET"])
    return router


class _Responses:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore(service.config.limits.max_stored_bytes)

    async def create(self, request: Request) -> Response:
        service = self._service
        body = await read_when_ready(service, request, ResponsesRequest)
        owner = request.state.owner
        previous = self._previous(owner, body.fields.previous_response_id)
        is_stored = self._is_stored(body.fields)
        translated = await to_chat(body, previous)
        with readdressed(translated.addresses):
            chat = await prepare_chat(service, translated.chat)
        answer_id = service.answer_id("resp_", request.state.request_id)
        keep = self._keeper(owner, answer_id, body, translated) if is_stored else None
        call_key = chat.prompt.call_key
        renderer = ResponseRenderer(
            answer_id, service.model_name, call_key, body, keep, service.tokenizer
        )
        plan = Plan(answer_id, chat.choices, renderer)
        return await run_plan(service, request, plan, body.fields.stream)

    async def read(self, request: Request, response_id: str) -> Response:
        return Response(self._found(request, response_id).body, media_type=JSON)

    async def delete(self, request: Request, response_id: str) -> Response:
        if not self._store.delete(request.state.owner, response_id):
            raise _not_found(response_id)
        answer = {"id": response_id, "object": "response", "deleted": True}
        return Response(msgspec.json.encode(answer), media_type=JSON)

    async def items(self, request: Request, response_id: str) -> Response:
        items = self._found(request, response_id).input_items
        answer = {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"],
            "last_id": items[-1]["id"],
            "has_more": False,
        }
        return Response(msgspec.json.encode(answer), media_type=JSON)

    def _is_stored(self, request: ResponsesRequest) -> bool:
        if request.store and not self._store.is_on:
            raise unsupported("store", "this server stores no responses; send store false")
        return self._store.is_on and request.store is not False

    def _previous(self, owner: bytes, response_id: str | None) -> Stored | None:
        if response_id is None:
            return None
        found = self._store.get(owner, response_id)
        if found is None:
            raise ApiError(
                400,
                f"The previous response {shown(response_id)} is not stored (any more)",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return found

    def _found(self, request: Request, response_id: str) -> Stored:
        found = self._store.get(request.state.owner, response_id)
        if found is None:
            raise _not_found(response_id)
        return found

    def _keeper(
        self, owner: bytes, answer_id: str, body: Body[ResponsesRequest], translated: Translated
    ) -> Keep:
        def keep(answer: bytes, blocks: Sequence[Block]) -> None:
            items = [
                {"id": f"item_{answer_id.removeprefix('resp_')}_{index}"}
                | item.model_dump(exclude_none=True)
                for index, item in enumerate(body.fields.input)
            ]
            # The size of the translated chat counts the conversation before it as well.
            size = translated.chat.size + 2 * len(answer)
            conversation = [*translated.conversation, *answer_turn(blocks)]
            self._store.put(owner, answer_id, Stored(answer, conversation, items, size))

        return keep


def _not_found(response_id: str) -> ApiError:
    message = f"No stored response has the id {shown(response_id)}"
    return ApiError(404, message, code="response_not_found")
