"""What every generating route does around its plan: read a body while ready, run, answer, land."""

import dataclasses
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel

from ..scheduler.messages import Handling
from .bodies import Body, read_body
from .engine_client import Health
from .errors import unavailable, unsupported
from .generation import Plan, streamed_answer, whole_answer
from .protocol import GenerationRequest
from .service import Service
from .sse import EventStream, while_connected

JSON = "application/json"

_Fields = TypeVar("_Fields", bound=BaseModel)


async def read_when_ready(
    service: Service, request: Request, model: type[_Fields]
) -> Body[_Fields]:
    """The body of a request; raises ApiError 503 before it is read where nothing is served."""
    health = service.client.health
    if health is not Health.READY:
        raise unavailable(health.value)
    return await read_body(request, service.config, model)


def handling_of(service: Service, fields: GenerationRequest) -> Handling:
    """What the engine is told about a request beside its tokens; raises ApiError."""
    if fields.priority and service.config.engine.scheduler.policy == "fcfs":
        text = "requests are served first come, first served; only 0 is taken"
        raise unsupported("priority", text)
    return Handling(
        cache_salt=fields.cache_salt or "",
        uses_cache=fields.cache_prompt,
        priority=fields.priority,
        deadline_seconds=fields.deadline_seconds,
    )


def tenant_of(request: Request) -> str:
    """Whom the engine is told a request comes from: its API key, by its digest."""
    return request.state.owner.hex()


async def run_plan(service: Service, request: Request, plan: Plan, stream: bool) -> Response:
    """The answer to a plan, in one piece or as events; a client that leaves ends it.

    Here every route's request gets its tenant, which no field of a body can name.
    """
    handling = msgspec.structs.replace(plan.handling, tenant=tenant_of(request))
    plan = dataclasses.replace(plan, handling=handling)
    generation = request.state.generation = service.launch(plan)
    if stream:
        return EventStream(
            streamed_answer(generation),
            lambda: service.land(generation),
            service.config.sse_keep_alive_interval,
        )
    try:
        answer = await while_connected(request.receive, whole_answer(generation))
    finally:
        service.land(generation)
    return Response(answer, media_type=JSON)
