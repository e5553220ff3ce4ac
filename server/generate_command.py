"""`minidsa generate`: one prompt, its text as it comes, no server.

The engine runs in a child as behind the server, and the prompt goes the way of a request of
`/v1/completions` (or, with `--chat`, of a chat), so defaults, limits and refusals are those of the
API.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..configs.server import ServerConfig
from ..scheduler.process import EngineProcess
from .bodies import Body
from .chat import prepare_chat
from .chat_answer import ChatRenderer
from .chat_protocol import ChatRequest
from .completion_answer import CompletionRenderer
from .completions import prepare_completion
from .engine_client import EngineClient
from .generation import Generation, Plan
from .openai_stream import OpenAIStream
from .protocol import CompletionRequest
from .running import handling_of
from .service import Service
from .serving import make_service
from .start_failed import StartFailed, refusing
from .text_side import TextFiles, TextSide
from .validation import validate

ANSWER_ID = "generate"
Write = Callable[[str], None]


async def generate(config: ServerConfig, fields: dict[str, Any], write: Write) -> None:
    """Load, answer one request, write its text piece by piece.

    fields: the body of a completion, or of a chat where it has `messages`. Raises StartFailed where
    the checkpoint cannot be loaded and ApiError for a request that cannot be served.
    """
    document = fields | {"model": ""}
    is_chat = "messages" in fields
    # A wrong field is told before a model is loaded.
    validated = validate(ChatRequest if is_chat else CompletionRequest, document)
    body: Body[Any] = Body(validated, document, len(msgspec.json.encode(document)))
    engine = EngineProcess.start(config.engine)
    try:
        service = await _load(config, engine)
        plan = await _plan(service, body, is_chat=is_chat)
        generation = service.launch(plan)
        try:
            await _write_all(generation, write)
        finally:
            service.land(generation)
            await service.trials.close()
            await service.client.stop()
        await engine.stop()
    finally:
        engine.close()


async def _load(config: ServerConfig, engine: EngineProcess) -> Service:
    client = EngineClient(engine, config.heartbeat_seconds, config.engine.hang_timeout)
    with refusing():
        files = TextFiles.read(Path(config.engine.model))
        text = TextSide.fit(files, await client.plan(), config.chat_format)
    service = make_service(config, client, await client.load(), text, None)
    client.start()
    waits = [asyncio.ensure_future(event.wait()) for event in (client.ready, client.dead)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if client.failure is not None:
        raise StartFailed(client.failure)
    return service


async def _plan(service: Service, body: Body[Any], *, is_chat: bool) -> Plan:
    if is_chat:
        prepared = await prepare_chat(service, body)
        objects = ChatRenderer(service, prepared.request, prepared.prompt, ANSWER_ID)
    else:
        prepared = await prepare_completion(service, body)
        objects = CompletionRenderer(service, prepared.request, prepared.prompts, ANSWER_ID)
    handling = handling_of(service, prepared.request)
    return Plan(ANSWER_ID, prepared.choices, OpenAIStream(objects, None), handling=handling)


async def _write_all(generation: Generation, write: Write) -> None:
    async for updates in generation.updates():
        for update in updates.values():
            if text := update.reasoning + update.content:
                write(text)
