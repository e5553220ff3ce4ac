"""What a parser says about the model's text, in the order it is written.

Events are forward-only: what was said is never taken back, so streaming and whole answers are made
of the same list. `start` counts characters of the model's raw text, markup included, which is how a
stop found in shown text finds its token again.
"""

import msgspec


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning"):
    """A piece of the thoughts, verbatim from place `start` of the raw text."""

    text: str
    start: int


class ContentText(msgspec.Struct, frozen=True, tag="content"):
    """A piece of the answer, verbatim from place `start` of the raw text."""

    text: str
    start: int


class CallStart(msgspec.Struct, frozen=True, tag="call_start"):
    """A tool call begins; its arguments follow. `id` only where the model's own text names it."""

    index: int
    name: str
    id: str | None = None


class CallArgs(msgspec.Struct, frozen=True, tag="call_args"):
    """The next piece of a call's arguments: JSON text, written once from left to right."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, tag="call_end"):
    """The arguments are a complete JSON object; a call that never gets here is not to be run."""

    index: int


Event = ReasoningText | ContentText | CallStart | CallArgs | CallEnd


def merge_events(events: list[Event]) -> list[Event]:
    """The same list with neighbouring pieces of one text joined, as if it had come in one push."""
    merged: list[Event] = []
    for event in events:
        joined = _joined(merged[-1], event) if merged else None
        if joined is None:
            merged.append(event)
        else:
            merged[-1] = joined
    return merged


def _joined(first: Event, second: Event) -> Event | None:
    match first, second:
        case (ReasoningText(), ReasoningText()) | (ContentText(), ContentText()):
            return type(first)(first.text + second.text, first.start)
        case (CallArgs(), CallArgs()) if first.index == second.index:
            return CallArgs(first.index, first.text + second.text)
    return None
