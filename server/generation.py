"""Runs a validated request: submits its choices, turns outputs into updates, counts and cleans up.

Whatever way a request ends (its text, a stop, an abort, a client that left, a dead engine), the
engine hears of every sequence that it still works on, once.
"""

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from ..configs.sampling import SamplingParams
from .answers import Answer, Usage, count_usage
from .engine_client import EngineCall, EngineClient, fault_of
from .metrics import Metrics, RequestTimes
from .sequence import ChoiceText, Update, join_updates


@dataclass(frozen=True)
class Choice:
    """One sequence to generate; choices of one prompt share the list of its ids."""

    prompt_ids: list[int]
    params: SamplingParams
    text: ChoiceText


class Renderer(Protocol):
    """Writes updates in the shape of one route."""

    def opening(self) -> list[Answer]:
        """Chunks that come before the first token."""
        ...

    def chunk(self, index: int, update: Update) -> Answer | None:
        """The chunk of an update; None where it has nothing to show."""
        ...

    def whole(self, updates: list[Update]) -> Answer:
        """The answer that is not streamed, from one joined update a choice."""
        ...

    def bare(self) -> Answer:
        """A chunk without choices, for the usage."""
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
    include_usage: bool = False
    continuous_usage: bool = False


class Generation:
    """A plan on its way. Iterate `updates` once, and `close` in any case."""

    def __init__(self, plan: Plan, client: EngineClient, metrics: Metrics) -> None:
        self.plan = plan
        self._client = client
        self._metrics = metrics
        self._call: EngineCall | None = None
        # Of our own making: while a long prompt is encoded, another request may take the same id.
        self.key = f"{plan.id}-{secrets.token_hex(8)}"
        self._indices = {f"{self.key}-{i}": i for i in range(len(plan.choices))}
        self._times = RequestTimes(time.monotonic())
        self._unfinished = len(plan.choices)
        self._has_failed = False

    def start(self) -> None:
        """Submit every choice; nothing was awaited since the capacity was checked."""
        choices = self.plan.choices
        self._call = self._client.submit(
            {name: (choices[i].prompt_ids, choices[i].params) for name, i in self._indices.items()}
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
                before = text.num_tokens
                text.push(output, updates.setdefault(index, Update()))
                self._times.count(text.num_tokens - before, self._metrics)
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
                reasons = [choice.text.finish_reason or "abort" for choice in self.plan.choices]
                self._times.finish(reasons, self._metrics)

    def usage(self) -> Usage:
        """Counts up to now."""
        choices = self.plan.choices
        step = len(choices) // self.plan.num_prompts
        return count_usage(
            prompt=sum(len(choice.prompt_ids) for choice in choices[::step]),
            completion=sum(choice.text.num_tokens for choice in choices),
            reasoning=sum(choice.text.num_reasoning_tokens for choice in choices),
            cached=0,
        )


async def whole_answer(generation: Generation) -> Answer:
    """The answer that is not streamed."""
    collected: list[list[Update]] = [[] for _ in generation.plan.choices]
    async for updates in generation.updates():
        for index, update in updates.items():
            collected[index].append(update)
    answer = generation.plan.renderer.whole([join_updates(updates) for updates in collected])
    answer.usage = generation.usage()
    return answer


async def chunks(generation: Generation) -> AsyncIterator[list[Answer]]:
    """The chunks of a stream, those of one step together."""
    plan = generation.plan
    opening = plan.renderer.opening()
    if plan.continuous_usage:
        for chunk in opening:
            chunk.usage = generation.usage()
    yield opening
    async for updates in generation.updates():
        made = (plan.renderer.chunk(index, update) for index, update in updates.items())
        step = [chunk for chunk in made if chunk is not None]
        if plan.continuous_usage:
            for chunk in step:
                chunk.usage = generation.usage()
        yield step
    if plan.include_usage:
        last = plan.renderer.bare()
        last.usage = generation.usage()
        yield [last]
