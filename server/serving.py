"""The life of a server process: load, listen, serve, drain, leave.

The address is taken before the model is loaded, so that a taken port is told at once, but nobody
is listened to before the checkpoint was read and verified. The first SIGTERM or SIGINT ends the
intake: open requests finish, then the process leaves with 0. The second one, a cut drain and a dead
engine leave with 1.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import uvicorn

from ..configs.engine_info import EngineInfo
from ..configs.server import ServerConfig
from ..scheduler.process import EngineProcess
from .activity import report_activity
from .app import create_app
from .banner import loaded_lines, ready_line
from .engine_client import EngineClient
from .grammar_trials import GrammarTrials
from .http_protocol import guarded_protocol
from .keys import Keyring, read_keyring
from .metrics import Metrics
from .sampling import SeedSource
from .service import Service
from .start_failed import StartFailed, refusing
from .start_stages import StartStages
from .text_side import TextFiles, TextSide
from .tracing import connect_tracing

TELLING_SECONDS = 1.0
"""Time for open streams to be told of the engine's death before the process leaves."""
BACKLOG = 2048  # connections that wait to be accepted, uvicorn's own default
LEAVING_SECONDS = 0.2
"""Time for the engine to leave by itself; it has nothing left to save."""
CUT_SECONDS = 1.0
"""Time for aborted streams to write their end."""

_log = logging.getLogger(__name__)
Say = Callable[[str], None]
T = TypeVar("T")


def bind(host: str, port: int) -> socket.socket:
    """The socket to serve on, not listening yet; raises StartFailed where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartFailed(f"cannot listen on {host} port {port}: {reason}") from None
    # The option let this bind ignore connections of an earlier run. Left on, it would let another
    # server bind as well for as long as this one loads and does not listen.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return sock


def listen(sock: socket.socket) -> None:
    """Accept connections from now on; raises StartFailed if another socket was faster."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise StartFailed(f"cannot listen on {host} port {port}: {error.strerror}") from None


class _Listener(uvicorn.Server):
    """uvicorn without its signal handling, which ends a clean shutdown by a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    """One run of a server over an engine that was started; `run` returns the exit code.

    signals: those that have come and will come, each of which asks to leave.
    """

    def __init__(
        self, config: ServerConfig, say: Say, engine: EngineProcess, signals: asyncio.Queue[int]
    ) -> None:
        self._config = config
        self._say = say
        self._engine = engine
        self._signals = signals
        self._stages = StartStages()

    async def run(self) -> int:
        """Serve until told to leave; raises StartFailed where nothing can be served."""
        config = self._config
        with refusing():
            files = TextFiles.read(Path(config.engine.model))
        with refusing(is_setting=True):
            keyring = read_keyring(config.api_key, config.api_key_file)
            tracing = connect_tracing(config.otlp_traces_endpoint)
        with bind(config.host, config.port) as sock:
            client = EngineClient(
                self._engine, config.heartbeat_seconds, config.engine.hang_timeout
            )
            service = await self._until_signal(self._load(client, files, keyring))
            if service is None:
                self._say("stopped before the model was loaded")
                return 1
            listen(sock)
            code = await self._serve(dataclasses.replace(service, tracing=tracing), sock)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            await service.trials.close()
            await client.stop()
            await self._engine.stop(timeout=LEAVING_SECONDS)
            return code

    async def _load(
        self, client: EngineClient, files: TextFiles, keyring: Keyring | None
    ) -> Service:
        plan = await client.plan()
        self._stages.end("checks")
        with refusing():
            text = TextSide.fit(files, plan, self._config.chat_format)
        for line in plan.lines:
            self._say(line)
        info = await client.load()
        self._stages.end("weights and cache")
        service = make_service(self._config, client, info, text, keyring)
        for line in loaded_lines(service):
            self._say(line)
        return service

    async def _until_signal(self, work: Coroutine[None, None, T]) -> T | None:
        """The result of `work`; None if a signal came first."""
        working = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future(self._signals.get())
        try:
            await asyncio.wait((working, signalled), return_when=asyncio.FIRST_COMPLETED)
            # Both may have come at once.
            return None if signalled.done() else await working
        finally:
            working.cancel()
            signalled.cancel()
            await asyncio.gather(working, signalled, return_exceptions=True)

    async def _serve(self, service: Service, sock: socket.socket) -> int:
        client, listener = service.client, make_listener(service)
        client.start()
        serving = asyncio.create_task(listener.serve(sockets=[sock]), name="listener")
        announcing = asyncio.create_task(self._announce(service, sock), name="announcing")
        dying = asyncio.create_task(client.dead.wait(), name="dying")
        signalled = asyncio.create_task(self._signals.get(), name="signalled")
        try:
            await asyncio.wait((serving, dying, signalled), return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                code = await self._drain(service, dying)
            else:
                code = 1
                _log.error("%s", client.failure or "the listener has stopped")
                await asyncio.sleep(TELLING_SECONDS)
            await self._close(listener, serving, is_clean=code == 0)
            return code
        finally:
            for task in (announcing, dying, signalled):
                task.cancel()
            await asyncio.gather(announcing, dying, signalled, return_exceptions=True)

    async def _announce(self, service: Service, sock: socket.socket) -> None:
        await service.client.ready.wait()
        self._stages.end("warm-up")
        self._say(self._stages.line())
        host, port = sock.getsockname()[:2]
        self._say(ready_line(service.model_name, host, port))
        await report_activity(lambda: service.client.stats, self._say)

    async def _drain(self, service: Service, dying: "asyncio.Task[bool]") -> int:
        """Let open requests finish; returns 0 if all did."""
        service.client.drain()
        seconds, count = self._config.drain_seconds, len(service.generations)
        self._say(
            f"shutting down: {_requests(count)} in flight"
            + (f", up to {seconds:g} s for them; a second signal cuts them" if count else "")
        )
        finishing = asyncio.create_task(_until_idle(service))
        forced = asyncio.create_task(self._signals.get())
        try:
            await asyncio.wait(
                (finishing, forced, dying),
                timeout=seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if finishing.done():
                self._say("finished: every request was answered")
                return 0
            self._say(f"finished: {_requests(len(service.generations))} cut")
            if not forced.done():
                for generation in list(service.generations.values()):
                    generation.abort()
                await asyncio.wait((finishing,), timeout=CUT_SECONDS)
            return 1
        finally:
            finishing.cancel()
            forced.cancel()
            await asyncio.gather(finishing, forced, return_exceptions=True)

    async def _close(
        self, listener: uvicorn.Server, serving: "asyncio.Task[None]", is_clean: bool
    ) -> None:
        listener.should_exit = True
        # Forced, uvicorn does not wait for connections that are still open.
        listener.force_exit = not is_clean
        await asyncio.wait((serving,), timeout=2.0)
        if not serving.done():
            serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _until_idle(service: Service) -> None:
    while service.generations:
        await asyncio.sleep(0.02)


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def make_service(
    config: ServerConfig,
    client: EngineClient,
    info: EngineInfo,
    text: TextSide,
    keyring: Keyring | None,
) -> Service:
    """The parts of a server whose model is loaded."""
    directory = Path(config.engine.model)
    name = config.served_model_name or directory.resolve().name
    metrics = Metrics(name, lambda: client.stats, config.metrics_prefix)
    metrics.describe_cache(
        page_size=info.page_size,
        num_pages=info.num_cache_tokens // info.page_size,
        dtype=info.cache_dtype,
        prefix_reuse=config.engine.cache.prefix_reuse,
    )
    return Service(
        config=config,
        model_name=name,
        info=info,
        tokenizer=text.tokenizer,
        chat_format=text.chat_format,
        defaults=text.defaults,
        client=client,
        metrics=metrics,
        seeds=SeedSource(config.engine.seed),
        trials=GrammarTrials(directory, info.vocab_size, info.eos_token_ids),
        keyring=keyring,
        notes=text.notes,
    )


def make_listener(service: Service) -> uvicorn.Server:
    """uvicorn over the application, with our limits; signals stay with the caller."""
    limits = service.config.limits
    return _Listener(
        uvicorn.Config(
            create_app(service),
            http=guarded_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(limits.keep_alive_seconds),
        )
    )
