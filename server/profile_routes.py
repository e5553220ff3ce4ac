"""Take a profile of the engine: only where a folder for it is configured."""

from fastapi import APIRouter, Response

from ..scheduler.messages import Question, StartProfile, StopProfile
from .errors import ApiError
from .running import JSON
from .service import Service


def profile_routes(service: Service) -> APIRouter:
    """Both routes over one service."""
    router = APIRouter()

    async def ask(question: Question) -> Response:
        answer = await service.client.ask(question)
        if not answer.done:
            raise ApiError(409, answer.error, code="profile_refused")
        body = b'{"recording":true}' if not answer.file else b'{"file":"%b"}' % answer.file.encode()
        return Response(body, media_type=JSON)

    async def start() -> Response:
        return await ask(StartProfile())

    async def stop() -> Response:
        return await ask(StopProfile())

    router.add_api_route("/start_profile", start, methods=["POST"])
    router.add_api_route("/stop_profile", stop, methods=["POST"])
    return router
