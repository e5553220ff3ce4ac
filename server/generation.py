"""Runs a validated request: submits its choices, turns outputs into updates, counts and cleans up.

Whatever way a request ends (its text, a stop, an abort, a client that left, a dead engine), the
engine hears of every sequence that it still works on, once.
"""

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from ..configs.sampling import SamplingParams
from ..scheduler.messages import Handling, Submit
from .answers import Usage, count_usage, encode
from .engine_client import EngineCall, EngineClient
from .errors import ApiError, internal
from .faults import fault_of
from .long_text import in_thread_if_long
from .metrics import Metrics
from .request_times import RequestTimes
from .sequence import ChoiceText, Update, join_updates

SCORE_CHARACTERS = 20
"""What writing the scores of one token costs, in characters of text."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """One sequence to generate; choices of one prompt share the list of its ids."""

    prompt_ids: list[int]
    params: SamplingParams
    text: ChoiceText
    grammar: str | None = None


class Renderer(Protocol):
    """Writes a request's updates in the shape of one route.

    The pieces of a stream are bytes as they are sent; the counts are those up to now.
    """

    def opening(self, count: Callable[[], Usage]) -> bytes:
        """What comes before the first token."""
        ...

    def step(self, updates: Mapping[int, Update], count: Callable[[], Usage]) -> bytes:
        """What one step of the engine added, by the index of the choice."""
        ...

    def closing(self, count: Callable[[], Usage]) -> bytes:
        """What comes behind the end of every choice."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What comes instead of the rest."""
        ...

    def whole(self, updates: Sequence[Update], usage: Usage) -> Struct | dict[str, Any]:
        """The answer that is not streamed, from one joined update a choice."""
        ...


@dataclass(frozen=True)
class Plan:
    """A request after all checks. `num_prompts` prompts stand at the head of equal runs of choices.

    `id` is the answer's id and unique among the requests in flight.
    """

    id: str
    choices: list[Choice]
    renderer: Renderer
    num_prompts: int = 1
    handling: Handling = field(default_factory=Handling)


class Generation:
    """A plan on its way. Iterate `updates` once, and `close` in any case."""

    def __init__(self, plan: Plan, client: EngineClient, metrics: Metrics) -> None:
        self.plan = plan
        self._client = client
        self._call: EngineCall | None = None
        # Of our own making: while a long prompt is encoded, another request may take the same id.
        self.key = f"{plan.id}-{secrets.token_hex(8)}"
        self._indices = {f"{self.key}-{i}": i for i in range(len(plan.choices))}
        self._times = RequestTimes(len(plan.choices), metrics)
        self._unfinished = len(plan.choices)
        self._has_failed = False
        self._num_drafted = 0
        self._num_accepted = 0

    def start(self) -> None:
        """Submit every choice; nothing was awaited since the capacity was checked."""
        choices = self.plan.choices
        self._call = self._client.submit(
            [
                Submit(
                    name,
                    choices[i].prompt_ids,
                    choices[i].params,
                    choices[i].grammar,
                    self.plan.handling,
                )
                for name, i in self._indices.items()
            ]
        )

    async def updates(self) -> AsyncIterator[dict[int, Update]]:
        """What each step adds, by the index of the choice, until every choice is finished.

        Raises ApiError when the engine fails on a choice or is gone.
        """
        call = self._call
        while call is not None and self._unfinished:
            updates: dict[int, Update] = {}
            for output in await call.receive():
                index = self._indices[output.request_id]
                text = self.plan.choices[index].text
                if text.is_finished:
                    continue
                if output.finish_reason == "error":
                    self._has_failed = True
                    raise fault_of(output)
                self._num_drafted += output.num_drafted
                self._num_accepted += output.num_accepted
                before = text.num_tokens
                text.push(output, updates.setdefault(index, Update()))
                self._times.count(index, text.num_tokens - before, output.queue_seconds)
                if text.is_finished:
                    self._unfinished -= 1
                    call.finish(output.request_id)
            if updates:
                yield updates

    def abort(self) -> None:
        """End the answer where it is; its choices finish with the reason "abort"."""
        if self._call is not None:
            self._call.abort()

    def close(self) -> None:
        """Give up what has not finished."""
        if self._call is not None:
            self._call.close()
            self._call = None
            if not self._has_failed:
                self._times.finish(self.finish_reasons)

    @property
    def first_token_seconds(self) -> float | None:
        """From the start to the first token; None where none has come."""
        return self._times.to_first

    @property
    def finish_reasons(self) -> list[str]:
        """How each choice has ended, "abort" where it has not."""
        return [choice.text.finish_reason or "abort" for choice in self.plan.choices]

    def usage(self) -> Usage:
        """Counts up to now."""
        choices = self.plan.choices
        step = len(choices) // self.plan.num_prompts
        return count_usage(
            prompt=sum(len(choice.prompt_ids) for choice in choices[::step]),
            completion=sum(choice.text.num_tokens for choice in choices),
            reasoning=sum(choice.text.num_reasoning_tokens for choice in choices),
            cached=sum(choice.text.num_cached_tokens for choice in choices[::step]),
            drafted=self._num_drafted,
            accepted=self._num_accepted,
        )


async def whole_answer(generation: Generation) -> bytes:
    """The answer that is not streamed, as JSON."""
    collected: list[list[Update]] = [[] for _ in generation.plan.choices]
    num_scored = 0
    async for updates in generation.updates():
        for index, update in updates.items():
            collected[index].append(update)
            num_scored += len(update.logprobs) + len(update.prompt_logprobs or ())
    renderer, usage = generation.plan.renderer, generation.usage()

    def write() -> bytes:
        return encode(renderer.whole([join_updates(updates) for updates in collected], usage))

    return await in_thread_if_long(num_scored * SCORE_CHARACTERS, write)


async def streamed_answer(generation: Generation) -> AsyncIterator[bytes]:
    """The bytes of a stream, one piece for each step of the engine; failures are part of it."""
    renderer = generation.plan.renderer
    try:
        yield renderer.opening(generation.usage)
        async for updates in generation.updates():
            num_scored = sum(len(update.prompt_logprobs or ()) for update in updates.values())
            yield await in_thread_if_long(
                num_scored * SCORE_CHARACTERS, renderer.step, updates, generation.usage
            )
        yield renderer.closing(generation.usage)
    except ApiError as error:
        yield renderer.failure(error)
    except Exception:
        _log.exception("a stream failed")
        yield renderer.failure(internal())
