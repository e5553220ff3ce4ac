"""The frame that chat and completions share: chunks, the rules of their usage, `[DONE]`.

No comment lines are written: some benchmark clients read every line as JSON. A failure behind the
first byte becomes one event with the nested error object, then `[DONE]`: SDKs swallow a flat
object, and a stream that merely stops looks like success.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from .answers import Answer, Usage, encode_event
from .errors import ApiError
from .protocol import StreamOptions
from .sequence import Update

DONE = b"data: [DONE]\n\n"


class ChunkRenderer(Protocol):
    """Writes updates as the objects of one route."""

    def opening(self) -> list[Answer]:
        """Chunks that come before the first token."""
        ...

    def chunk(self, index: int, update: Update) -> Answer | None:
        """The chunk of an update; None where it has nothing to show."""
        ...

    def whole(self, updates: Sequence[Update]) -> Answer:
        """The answer that is not streamed, from one joined update a choice."""
        ...

    def bare(self) -> Answer:
        """A chunk without choices, for the usage."""
        ...


class OpenAIStream:
    """A `generation.Renderer` over the objects of a route."""

    def __init__(self, objects: ChunkRenderer, options: StreamOptions | None) -> None:
        self._objects = objects
        self._options = options or StreamOptions()

    def opening(self, count: Callable[[], Usage]) -> bytes:
        return self._events(self._objects.opening(), count)

    def step(self, updates: Mapping[int, Update], count: Callable[[], Usage]) -> bytes:
        made = (self._objects.chunk(index, update) for index, update in updates.items())
        return self._events((chunk for chunk in made if chunk is not None), count)

    def closing(self, count: Callable[[], Usage]) -> bytes:
        if not self._options.include_usage:
            return DONE
        last = self._objects.bare()
        last.usage = count()
        return encode_event(last) + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def whole(self, updates: Sequence[Update], usage: Usage) -> Answer:
        answer = self._objects.whole(updates)
        answer.usage = usage
        return answer

    def _events(self, chunks: Iterable[Answer], count: Callable[[], Usage]) -> bytes:
        shown = list(chunks)
        if self._options.continuous_usage_stats:
            for chunk in shown:
                chunk.usage = count()
        return b"".join(map(encode_event, shown))
