"""The routes beside generation: models, tokens, health, metrics and what the server is."""

import asyncio
import secrets
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from ..configs.sampling import SamplingParams
from ..scheduler.messages import FlushCache, Handling, Submit
from .bodies import Body, read_body
from .chat import encode_chat
from .engine_client import Health
from .errors import ApiError, invalid_value, model_not_found, unavailable
from .faults import fault_of
from .long_text import in_thread_if_long
from .metrics import CONTENT_TYPE
from .server_info import describe
from .service import Service
from .side_protocol import DetokenizeRequest, PromptRequest, TokenizeRequest

JSON = "application/json"
_Prompt = TypeVar("_Prompt", bound=PromptRequest)


def side_routes(service: Service) -> APIRouter:
    """Everything that does not generate."""
    router = APIRouter()
    for paths, handler, has_head in (
        (("/v1/models", "/models"), _Models(service).list, False),
        (("/v1/models/{name:path}", "/models/{name:path}"), _Models(service).card, False),
        (("/health", "/ping"), _Health(service).ready, True),
        (("/health_generate",), _Health(service).generates, False),
        (("/live",), _Health(service).live, True),
        (("/version",), _version, True),
        (("/metrics",), _Metrics(service).text, True),
        (("/server_info",), _Metrics(service).info, False),
    ):
        for path in paths:
            router.add_api_route(path, handler, methods=["GET"], name=f"{path} get")
            if has_head:
                router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
    for prefix in ("", "/v1"):
        tokens = _Tokens(service)
        router.add_api_route(f"{prefix}/tokenize", tokens.tokenize, methods=["POST"])
        router.add_api_route(f"{prefix}/detokenize", tokens.detokenize, methods=["POST"])
    for path in ("/flush_cache", "/reset_prefix_cache"):
        router.add_api_route(path, _Cache(service).flush, methods=["POST"])
    return router


def _answer(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


class _Models:
    """The list of models has one entry."""

    def __init__(self, service: Service) -> None:
        self._name = service.model_name
        self._card = {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "minidsa",
            "max_model_len": service.max_tokens,
        }

    async def list(self) -> Response:
        return _answer({"object": "list", "data": [self._card]})

    async def card(self, name: str) -> Response:
        if name != self._name:
            raise model_not_found(name, self._name)
        return _answer(self._card)


class _Health:
    """Liveness: this process answers. Readiness: the engine is heard and takes requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._client = service.client

    async def generates(self) -> Response:
        """One token, computed by the engine; raises ApiError 503 where it does not come in time."""
        limit = self._service.config.heartbeat_seconds
        params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        name = f"health-{secrets.token_hex(8)}"
        self._client.check(1, self._service.capacity)
        call = self._client.submit([Submit(name, [0], params, handling=Handling(uses_cache=False))])
        try:
            async with asyncio.timeout(limit):
                output = (await call.receive())[0]
        except TimeoutError:
            raise unavailable(f"no token came within {limit:g} seconds") from None
        finally:
            call.close()
        if output.finish_reason == "error":
            raise fault_of(output)
        return Response(status_code=200)

    async def ready(self) -> Response:
        if self._client.health is Health.READY:
            return Response(status_code=200)
        return Response(status_code=503, headers={"retry-after": "1"})

    async def live(self) -> Response:
        return Response(status_code=200)


async def _version() -> Response:
    return _answer({"version": version("minidsa")})


class _Metrics:
    """What the server counts, and what it is."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def text(self) -> Response:
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def info(self) -> Response:
        return _answer(describe(self._service))


class _Cache:
    """The cached prefixes, which an operator may want gone: before a measurement, say."""

    def __init__(self, service: Service) -> None:
        self._client = service.client

    async def flush(self) -> Response:
        if not (await self._client.ask(FlushCache())).done:
            raise ApiError(
                409, "Requests are in flight; the cache is flushed when idle", code="busy"
            )
        return _answer({"flushed": True})


async def prompt_ids(service: Service, body: Body[_Prompt]) -> list[int]:
    """The ids that generation would make of a prompt or a chat; raises ApiError."""
    fields = body.fields
    given = [name for name in ("prompt", "content", "messages") if body.document.get(name)]
    if len(given) > 1:
        raise invalid_value(given[1], f"{' and '.join(given)} do not go together")
    fields.check_form()
    if fields.messages:
        return (await encode_chat(service, body, fields, fields.messages)).ids
    text = fields.content if fields.prompt is None else fields.prompt
    if text is None:
        raise invalid_value("prompt", "prompt or messages is required")
    service.check_fits("prompt", len(text), None)
    return await in_thread_if_long(
        len(text), service.tokenizer.encode_text, text, fields.add_special_tokens is not False
    )


class _Tokens:
    """Text to ids as generation does it, and back."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, self._service.config, TokenizeRequest)
        fields, tokenizer = body.fields, self._service.tokenizer
        self._service.check_model(fields.model)
        ids = await prompt_ids(self._service, body)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._service.max_tokens,
            "tokens": ids,
        }
        if fields.return_token_strs:
            answer["token_strs"] = await in_thread_if_long(
                body.size, lambda: [tokenizer.token_text(i) for i in ids]
            )
        return _answer(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, self._service.config, DetokenizeRequest)
        self._service.check_model(body.fields.model)
        return _answer({"prompt": await in_thread_if_long(body.size, self._text, body.fields)})

    def _text(self, fields: DetokenizeRequest) -> str:
        limit, most = self._service.info.vocab_size, self._service.config.limits.max_request_tokens
        if len(fields.tokens) > most:
            raise invalid_value("tokens", f"at most {most} ids are taken, not {len(fields.tokens)}")
        if fields.tokens and (min(fields.tokens) < 0 or max(fields.tokens) >= limit):
            raise invalid_value("tokens", f"token ids run from 0 to {limit - 1}")
        return self._service.tokenizer.decode(fields.tokens)
