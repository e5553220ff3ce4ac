"""An engine that emits given ids, in milliseconds and without torch, and a server around it.

It stands at the place of `EngineProcess`: it takes commands and gives events. What a request gets
is decided by `script`, a function of its Submit; the end rules (stop ids, max_tokens) are the real
engine's.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import httpx
import msgspec
from starlette.types import ASGIApp

from minidsa.configs.engine import EngineConfig, SchedulerConfig
from minidsa.configs.server import LimitsConfig, ServerConfig
from minidsa.scheduler.messages import (
    Abort,
    Answer,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    FinishReason,
    FlushCache,
    Heartbeat,
    Loaded,
    Outputs,
    Planned,
    Ready,
    RequestOutput,
    RestoreSession,
    SaveSession,
    Shutdown,
    StartPlan,
    StartProfile,
    StopProfile,
    Submit,
    TokenLogprobs,
)
from minidsa.scheduler.process import EngineDied
from minidsa.server.app import create_app
from minidsa.server.chat_formats import DeepseekV32
from minidsa.server.engine_client import EngineClient
from minidsa.server.grammar_trials import GrammarTrials
from minidsa.server.keys import read_keyring
from minidsa.server.metrics import Metrics
from minidsa.server.sampling import SamplingDefaults, SeedSource
from minidsa.server.service import Service
from minidsa.server.tokenizer import Tokenizer
from tokenizers_small import small_tokenizer

VOCAB = 512
CONTEXT = 256
EOS = 1
Script = Callable[[Submit], Iterable[int]]


def echo_script(submit: Submit) -> Iterable[int]:
    """Ids that depend on the prompt and, above temperature 0, on the seed."""
    start = sum(submit.prompt_ids)
    if submit.params.temperature:
        start += submit.params.seed
    return (100 + (start + 7 * position) % 100 for position in range(10**6))


class ScriptedEngine:
    """Emits one token a step for every running request, `burst` tokens where that is set.

    `pace` is the time of a step in seconds; with `held` true no step is made. `seen` lists every
    command.
    """

    def __init__(self, script: Script = echo_script, burst: int = 1, pace: float = 0.0) -> None:
        self.script = script
        self.burst = burst
        self.pace = pace
        self.held = False
        self.cached = 0  # prompt tokens that every request finds in the cache
        self.is_profiling = False
        self.seen: list[Command] = []
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def submits(self) -> list[Submit]:
        return [command for command in self.seen if isinstance(command, Submit)]

    @property
    def aborts(self) -> list[str]:
        return [command.request_id for command in self.seen if isinstance(command, Abort)]

    @property
    def num_running(self) -> int:
        return len(self._running)

    def send(self, command: Command) -> None:
        self.seen.append(command)
        match command:
            case Submit():
                task = asyncio.ensure_future(self._run(command))
                self._running[command.request_id] = task
            case Abort(request_id):
                if task := self._running.pop(request_id, None):
                    task.cancel()
            case FlushCache():
                self.emit(Answer(not self._running))
            case SaveSession(name) | RestoreSession(name):
                exists = name != "missing"
                self.emit(Answer(exists, 5 * exists, "" if exists else f"no session {name}"))
            case StartProfile() | StopProfile():
                is_start = isinstance(command, StartProfile)
                done = is_start != self.is_profiling
                self.is_profiling = is_start
                file = "trace.json.gz" if done and not is_start else ""
                self.emit(Answer(done, error="" if done else "not now", file=file))
            case Shutdown():
                self.die()

    async def recv(self) -> Event:
        event = await self.events.get()
        if event is None:
            raise EngineDied(-9)
        return event

    def emit(self, event: Event) -> None:
        self.events.put_nowait(event)

    def die(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._running.clear()
        self.events.put_nowait(None)

    def _stats(self) -> EngineStats:
        busy = len(self._running)
        return EngineStats(num_running=busy, num_pages=100, num_free_pages=100 - busy)

    async def _run(self, submit: Submit) -> None:
        params, name = submit.params, submit.request_id
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [score(i, params.prompt_logprobs) for i in submit.prompt_ids[1:]]
        if params.max_tokens == 0:
            await self._emit(RequestOutput(name, [], "length", prompt_logprobs=prompt_logprobs))
            return
        ids: list[int] = []
        count = 0
        for token_id in self.script(submit):
            count += 1
            ids.append(token_id)
            stops = token_id in params.stop_token_ids and count > params.min_tokens
            reason: FinishReason | None = "stop" if stops else None
            if reason is None and count == params.max_tokens:
                reason = "length"
            if reason is None and len(ids) < self.burst:
                continue
            logprobs = None
            if params.logprobs is not None:
                logprobs = [score(i, params.logprobs) for i in ids]
            output = RequestOutput(name, ids, reason, logprobs, prompt_logprobs)
            waited = 0.0 if count == len(ids) else None
            await self._emit(
                msgspec.structs.replace(output, cached_tokens=self.cached, queue_seconds=waited)
            )
            ids, prompt_logprobs = [], None
            if reason is not None:
                return
        # A script that ends before its request waits for the end of it; a grammar's is complete.
        if submit.grammar is not None:
            await self._emit(RequestOutput(name, ids, "complete"))
            return
        if ids:
            await self._emit(RequestOutput(name, ids))
        await asyncio.Event().wait()

    async def _emit(self, output: RequestOutput) -> None:
        await asyncio.sleep(self.pace)
        while self.held:
            await asyncio.sleep(0.001)
        if output.finish_reason is not None:
            self._running.pop(output.request_id, None)
        self.emit(Outputs([output], self._stats()))


def score(token_id: int, count: int) -> TokenLogprobs:
    """A made-up distribution: the token is second likeliest, behind the next id."""
    tops = [(token_id + 1) % VOCAB, token_id, *(i for i in range(20))][:count]
    values = [-0.5 - rank for rank in range(len(tops))]
    return TokenLogprobs(-1.5, 2, tops, values)


INFO = EngineInfo(
    model_type="deepseek_v32",
    vocab_size=VOCAB,
    max_model_len=CONTEXT,
    eos_token_ids=[EOS],
    num_parameters=1000,
    weight_bytes=4000,
    dtype="float32",
    device="cpu",
    attention_backend="scripted",
    page_size=16,
    num_cache_tokens=4096,
    cache_bytes_per_token=64,
    cache_dtype="float32",
    max_num_seqs=64,
    max_num_batched_tokens=256,
    max_prefill_tokens=64,
    speculative="none",
    index_topk=64,
    num_speculative_tokens=0,
    notes=[],
)


@dataclasses.dataclass
class Bed:
    """A server around a scripted engine, and a client that talks to it in this process."""

    engine: ScriptedEngine
    service: Service
    app: ASGIApp
    client: httpx.AsyncClient
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_runs([text])


@contextlib.asynccontextmanager
async def serving(
    script: Script = echo_script,
    *,
    burst: int = 1,
    pace: float = 0.0,
    ready: bool = True,
    info: EngineInfo = INFO,
    config: ServerConfig | None = None,
) -> AsyncIterator[Bed]:
    """The application over a scripted engine, started and stopped."""
    engine = ScriptedEngine(script, burst, pace)
    config = config or server_config()
    client = EngineClient(engine, config.heartbeat_seconds, config.engine.hang_timeout)
    engine.emit(Planned(StartPlan(info.model_type, info.vocab_size, [])))
    await client.plan()
    engine.emit(Loaded(info))
    loaded = await client.load()
    client.start()
    metrics = Metrics("tiny", lambda: client.stats, config.metrics_prefix)
    metrics.describe_cache(page_size=16, num_pages=256, dtype="float32", prefix_reuse=True)
    service = Service(
        config=config,
        model_name=config.served_model_name or "tiny",
        info=loaded,
        tokenizer=small_tokenizer(VOCAB),
        chat_format=DeepseekV32(),
        defaults=SamplingDefaults(),
        client=client,
        metrics=metrics,
        seeds=SeedSource(config.engine.seed),
        trials=GrammarTrials(Path(config.engine.model), loaded.vocab_size, loaded.eos_token_ids),
        keyring=read_keyring(config.api_key, config.api_key_file),
    )
    app = create_app(service)
    if ready:
        engine.emit(Ready())
        engine.emit(Heartbeat(EngineStats(num_pages=100, num_free_pages=100)))
        await client.ready.wait()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Bed(engine, service, app, http, service.tokenizer)
    await service.trials.close()
    await client.stop()
    engine.die()


def server_config(
    max_queue: int = 1024, limits: LimitsConfig | None = None, **changes: object
) -> ServerConfig:
    scheduler = SchedulerConfig(max_queue=max_queue)
    config = ServerConfig(limits=limits or LimitsConfig(), engine=EngineConfig(scheduler=scheduler))
    return dataclasses.replace(config, **changes)
