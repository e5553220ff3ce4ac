"""Splits a model's text into thoughts and answer, and hands the answer to a content parser.

The state to start in comes from the prompt's last think marker, not from the text. Works on text
decoded with special tokens kept: a marker may arrive in pieces, and a model or a grammar may spell
it with ordinary tokens.
"""

from typing import Literal, Protocol

from .events import ContentText, Event, ReasoningText
from .scanner import Scanner

START_THINK, END_THINK = "<think>", "</think>"


class ContentParser(Protocol):
    """Reads the text behind the thoughts; `place` is where its first text stands."""

    def feed(self, text: str, place: int) -> list[Event]: ...
    def finish(self, cut: bool) -> list[Event]: ...


class PlainContent:
    """Content as it is: no tools were given, so markup is text like any other."""

    def feed(self, text: str, place: int) -> list[Event]:
        return [ContentText(text, place)] if text else []

    def finish(self, cut: bool) -> list[Event]:
        return []


class OutputParser:
    """One answer's parser. Feed it all text, then finish it once.

    With `separate` false the markers are content, and thoughts are not repeated: who shows them
    leaves them there too. `may_open` is for models whose prompt does not open the thoughts: a text
    that begins with the opening marker does.
    """

    def __init__(
        self,
        start: Literal["reasoning", "content"],
        content: ContentParser,
        separate: bool = True,
        may_open: bool = False,
    ) -> None:
        self._scanner = Scanner()
        self._content = content
        self._separate = separate
        self._may_open = may_open
        self._state: Literal["first", "reasoning", "content"] = (
            "reasoning" if start == "reasoning" else "first"
        )
        self._thoughts: list[str] = []
        self._thoughts_start = 0

    def feed(self, text: str) -> list[Event]:
        """Events that the new text decides; neighbours of one kind may come in pieces."""
        self._scanner.push(text)
        events: list[Event] = []
        if self._state == "first":
            events += self._first()
        if self._state == "reasoning":
            events += self._reasoning()
        if self._state == "content":
            events += self._pass_on()
        return events

    def finish(self, cut: bool) -> list[Event]:
        """The last events. `cut` says that the length limit ended the text, not the model.

        A model that ended inside its thoughts gets them repeated as content, so that a tool loop
        still has an answer.
        """
        events: list[Event] = []
        if self._state == "reasoning":
            events += self._think(self._scanner.take())
            if not cut and self._separate and (text := "".join(self._thoughts)):
                events.append(ContentText(text, self._thoughts_start))
            return events
        return [*self._pass_on(), *self._content.finish(cut)]

    def _first(self) -> list[Event]:
        """A closing marker at the very beginning is dropped: some answers repeat the prompt's."""
        scanner = self._scanner
        if scanner.starts_with(END_THINK):
            marker = scanner.take(len(END_THINK))
            self._state = "content"
            return self._marker(marker, scanner.place - len(marker))
        if self._may_open and scanner.starts_with(START_THINK):
            marker = scanner.take(len(START_THINK))
            self._state = "reasoning"
            self._thoughts_start = scanner.place
            return self._marker(marker, scanner.place - len(marker))
        markers = (END_THINK, START_THINK) if self._may_open else (END_THINK,)
        if not scanner.may_become(*markers):
            self._state = "content"
        return []

    def _reasoning(self) -> list[Event]:
        scanner = self._scanner
        text, closed = scanner.take_until(END_THINK)
        events = self._think(text)
        if closed:
            self._state = "content"
            self._thoughts = []
            events += self._marker(scanner.take(len(END_THINK)), scanner.place - len(END_THINK))
        return events

    def _think(self, text: str) -> list[Event]:
        if not text:
            return []
        self._thoughts.append(text)
        return [ReasoningText(text, self._scanner.place - len(text))]

    def _marker(self, marker: str, place: int) -> list[Event]:
        return [] if self._separate else [ContentText(marker, place)]

    def _pass_on(self) -> list[Event]:
        place = self._scanner.place
        return self._content.feed(self._scanner.take(), place)
