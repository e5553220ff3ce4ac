"""One choice: from the engine's tokens to the pieces of its answer.

Streams and whole answers are made of the same updates, so they cannot differ: a stream writes each
one, a whole answer joins them. Ids, logprobs and counts end with the text: what the engine computed
behind a stop string is dropped here.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from ..configs.logprobs import TokenLogprobs
from ..scheduler.messages import RequestOutput
from .detokenizer import Detokenizer
from .parsers.events import CallArgs, CallEnd, CallStart, ContentText, Event, ReasoningText
from .parsers.reasoning import END_THINK
from .stops import StopMatcher


class Parser(Protocol):
    """Splits text into thoughts, content and calls; see `parsers`."""

    def feed(self, text: str) -> list[Event]: ...
    def finish(self, cut: bool) -> list[Event]: ...


class RawText:
    """The parser of completions: everything is content."""

    def __init__(self) -> None:
        self._place = 0

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        start, self._place = self._place, self._place + len(text)
        return [ContentText(text, start)]

    def finish(self, cut: bool) -> list[Event]:
        return []


class TextScore(NamedTuple):
    """A token, where its text begins and ends in all that the model wrote, and its score."""

    start: int
    end: int
    token_id: int
    logprobs: TokenLogprobs


class Shown(NamedTuple):
    """A piece of text that can be shown: of the thoughts, or of the answer.

    scores: of the answer's tokens that wrote it, where scores are asked for.
    """

    text: str
    is_reasoning: bool = False
    scores: Sequence[TextScore] = ()


Part = Shown | CallStart | CallArgs


@dataclass
class Update:
    """What some tokens of a choice added; `offsets` are the places where their texts begin.

    `parts` are in the order of the model's text; `content`, `reasoning` and `calls` sort them.
    """

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def content(self) -> str:
        return self._text(is_reasoning=False)

    @property
    def reasoning(self) -> str:
        return self._text(is_reasoning=True)

    @property
    def calls(self) -> list[CallStart | CallArgs]:
        return [part for part in self.parts if not isinstance(part, Shown)]

    def show(self, text: str, is_reasoning: bool = False, scores: Sequence[TextScore] = ()) -> None:
        """Add text, if there is any."""
        if text:
            self.parts.append(Shown(text, is_reasoning, scores))

    def _text(self, is_reasoning: bool) -> str:
        shown = (part for part in self.parts if isinstance(part, Shown))
        return "".join(part.text for part in shown if part.is_reasoning == is_reasoning)


@dataclass(frozen=True)
class EndRules:
    """When and how a choice ends, beside what the engine decides."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()  # the request's own; EOS is not among them
    min_tokens: int = 0
    max_calls: int | None = None

    @cached_property
    def matcher(self) -> StopMatcher:
        """Built once, however many choices these rules end."""
        return StopMatcher(self.stops, self.include_stop)


class ChoiceText:
    """Collects one choice's updates; `is_finished` once its answer is complete."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: Parser,
        rules: EndRules,
        thinking: bool = False,
        separate: bool = True,
    ) -> None:
        """`thinking`: the prompt ends inside the thoughts. Unless `separate` they are content."""
        self._detokenizer = detokenizer
        self._parser = parser
        self._rules = rules
        self._matchers = {kind: rules.matcher.fork() for kind in (ReasoningText, ContentText)}
        self._num_seen = {ReasoningText: 0, ContentText: 0}
        self._in_call = False
        self._num_calls = 0
        self._unplaced: deque[TextScore] = deque()
        self._is_thinking = thinking
        self._separate = separate
        self._thoughts_end = 0
        self._end: tuple[str, int | str | None] | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0

    @property
    def is_finished(self) -> bool:
        return self._end is not None

    @property
    def finish_reason(self) -> str | None:
        return None if self._end is None else self._end[0]

    def push(self, output: RequestOutput, update: Update) -> None:
        """Add to `update` what `output` brings; nothing once the choice is finished."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            update.prompt_logprobs = output.prompt_logprobs
        stopped = output.finish_reason == "stop"
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            if self._end is not None:
                return
            shown = self._rules.include_stop or not (stopped and index == last)
            logprobs = output.logprobs[index] if output.logprobs else None
            self._token(token_id, logprobs, shown, update)
        if self._end is None and output.finish_reason is not None:
            self._finish(output, update)

    def _token(
        self, token_id: int, logprobs: TokenLogprobs | None, shown: bool, update: Update
    ) -> None:
        ends = self._detokenizer.token_ends
        offset = ends[-1] if ends else 0
        text = self._detokenizer.push((token_id,)) if shown else ""
        self.num_tokens += 1
        if logprobs is not None and shown:
            stop = self._detokenizer.token_ends[-1]
            self._unplaced.append(TextScore(offset, stop, token_id, logprobs))
        end = self._take(self._parser.feed(text), update) if text else None
        if self._is_thinking:
            self.num_reasoning_tokens = self.num_tokens
        if end is not None and shown and self._detokenizer.tokens_through(end) < self.num_tokens:
            # Its parser had held the text back: the token that released it is not part of it.
            self.num_tokens -= 1
            self.num_reasoning_tokens = min(self.num_reasoning_tokens, self.num_tokens)
        else:
            update.token_ids.append(token_id)
            update.offsets.append(offset)
            if logprobs is not None:
                update.logprobs.append(logprobs)
        if self._end is not None:
            update.finish_reason, update.stop_reason = self._end

    def _finish(self, output: RequestOutput, update: Update) -> None:
        # A complete grammar is a stop to clients, with no token behind the text.
        reason = "stop" if output.finish_reason == "complete" else output.finish_reason or "stop"
        tail = self._detokenizer.flush()
        events = [*self._parser.feed(tail), *self._parser.finish(reason != "stop")]
        self._take(events, update, is_tail=True)
        if self._end is None:
            update.show(self._matchers[ReasoningText].flush(), is_reasoning=True)
            update.show(self._matchers[ContentText].flush())
            if reason in ("stop", "length") and self._num_calls and not self._in_call:
                reason = "tool_calls"
            last = output.token_ids[-1] if output.token_ids else -1
            is_own = output.finish_reason == "stop" and last in self._rules.stop_token_ids
            self._end = reason, last if is_own else None
        update.finish_reason, update.stop_reason = self._end

    def _take(self, events: Iterable[Event], update: Update, is_tail: bool = False) -> int | None:
        """Add events; where a stop ends the choice, return the place behind it in the raw text.

        is_tail: what the parser says at the end; it may repeat thoughts as content there.
        """
        for said in events:
            event = self._follow_thoughts(said, is_tail)
            match event:
                case ReasoningText():
                    update.show(self._visible(event), is_reasoning=True)
                case ContentText():
                    update.show(self._visible(event), scores=self._scores_of(event))
                case CallStart():
                    self._in_call = True
                    update.show(self._matchers[ContentText].flush())
                    update.parts.append(event)
                case CallArgs():
                    update.parts.append(event)
                case CallEnd():
                    self._end_call()
            if self._end is not None:
                return self._place_behind(event)
        return None

    def _scores_of(self, event: ContentText) -> list[TextScore]:
        """The scores of the tokens that wrote a text; those of thoughts and markup are dropped."""
        found, stop = [], event.start + len(event.text)
        while self._unplaced and self._unplaced[0].start < stop:
            score = self._unplaced.popleft()
            # The first bytes of a character end where they begin.
            if score.end > event.start or score.start == event.start:
                found.append(score)
        return found

    def _visible(self, event: ReasoningText | ContentText) -> str:
        """The part of a text that can be shown now; ends the choice where a stop is complete."""
        matcher = self._matchers[type(event)]
        text = matcher.push(event.text, self.num_tokens > self._rules.min_tokens)
        if matcher.match is not None:
            self._end = "stop", matcher.match.stop
        else:
            self._num_seen[type(event)] += len(event.text)
        return text

    def _place_behind(self, event: Event) -> int | None:
        if not isinstance(event, ReasoningText | ContentText):
            return None
        match = self._matchers[type(event)].match
        return None if match is None else event.start + match.end - self._num_seen[type(event)]

    def _end_call(self) -> None:
        self._in_call = False
        self._num_calls += 1
        if self._num_calls == self._rules.max_calls:
            self._end = "tool_calls", None

    def _follow_thoughts(self, event: Event, is_tail: bool) -> Event:
        """Count thoughts: they cost the tokens up to and with their closing marker.

        Returns the event as it is shown: thoughts that are not told apart are content.
        """
        if isinstance(event, ReasoningText):
            self._is_thinking = self._is_thinking or not is_tail
            self._thoughts_end = event.start + len(event.text)
            return event if self._separate else ContentText(event.text, event.start)
        if self._is_thinking and not is_tail and isinstance(event, ContentText | CallStart):
            self._is_thinking = False
            end = self._thoughts_end + len(END_THINK)
            self.num_reasoning_tokens = self._detokenizer.tokens_through(end)
        return event


def join_updates(updates: Sequence[Update]) -> Update:
    """One update that says the same as all of them."""
    joined = Update()
    for update in updates:
        joined.parts += update.parts
        joined.token_ids += update.token_ids
        joined.logprobs += update.logprobs
        joined.offsets += update.offsets
        if update.prompt_logprobs is not None:
            joined.prompt_logprobs = update.prompt_logprobs
        if update.finish_reason is not None:
            joined.finish_reason, joined.stop_reason = update.finish_reason, update.stop_reason
    return joined
