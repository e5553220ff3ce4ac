"""Reads tool calls in DeepSeek-V3.2's markup, streaming their arguments as they are written.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="F">
    <｜DSML｜parameter name="K" string="true">text</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Text read but not explained yet is held. A call explains it; markup that turns out to be none is
given back as content, so nothing is lost. Once a call has begun its arguments go forward only: a
call that is torn in the middle never gets its end, and the rest becomes content. Invokes without
the wrapper, and the wrapper word of DeepSeek-V4, are read too.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from .arguments import ParameterTypes, is_json_object, json_value, typed_value
from .call_writer import CallWriter
from .events import ContentText, Event
from .scanner import Scanner

BLOCKS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
END_BLOCKS = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
INVOKE, END_INVOKE = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
PARAMETER, END_PARAMETER = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"

_OPENERS = (*BLOCKS, INVOKE)
_OPENER = re.compile("|".join(map(re.escape, _OPENERS)))
_HOLDS = tuple(newlines + opener for opener in _OPENERS for newlines in ("\n\n", "\n", ""))
_INVOKE_TAG = re.compile(re.escape(INVOKE) + r'(?P<name>[^\n]*)">')
_PARAMETER_TAG = re.compile(
    re.escape(PARAMETER) + r'(?P<name>[^\n]*)" string="(?P<is_text>true|false)">'
)
_LONGEST_TAG = 1024


class DsmlContent:
    """Content and calls of one answer; needs the tools for the types of their parameters.

    Each state is a method that reads what it can and says whether another state should go on.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._types = ParameterTypes(tools)
        self._scanner = Scanner()
        self._state: Callable[[], bool] = self._content
        self._events: list[Event] = []
        self._held: list[str] = []
        self._held_start = 0
        self._call = CallWriter(self._events)
        self._block_has_calls = False
        self._scalar_types: frozenset[str] = frozenset()
        self._value_is_text = False
        self._value: list[str] = []

    def feed(self, text: str, place: int) -> list[Event]:
        """Events of the next piece; the first piece stands at `place`, the others follow it."""
        if self._scanner.place == 0 and self._scanner.empty:
            self._scanner.move(place)
        self._scanner.push(text)
        while self._state():
            pass
        return self._take_events()

    def finish(self, cut: bool) -> list[Event]:
        """The last events: what the model left open is closed, what the length cut is not."""
        endings = {
            self._calls: self._end_calls,
            self._invoke: self._end_invoke,
            self._string: self._end_string,
            self._buffered: self._end_buffered,
            self._body: self._end_body,
        }
        if self._state in endings:
            endings[self._state](cut)
        elif self._state == self._content or not self._scanner.empty:
            self._give_back_all()
        return self._take_events()

    # The states.

    def _content(self) -> bool:
        """Plain text up to an opener; at most two newlines before it belong to the markup."""
        scanner = self._scanner
        length = scanner.search(_OPENER)
        if length is None:
            self._emit_content(scanner.take(scanner.num_safe(_HOLDS)))
            return False
        text = scanner.take(length)
        shown = text[:-2] + text[-2:].rstrip("\n")
        self._emit_content(shown, len(text))
        self._hold(text[len(shown) :])
        self._hold(scanner.take_literal(*BLOCKS))
        self._block_has_calls = False
        return self._go(self._calls)

    def _after(self) -> bool:
        """Behind a block: white space is dropped unless text follows it."""
        scanner = self._scanner
        self._hold(scanner.take_space())
        if scanner.starts_with(*_OPENERS):
            self._held.clear()
            return self._go(self._content)
        if scanner.empty or scanner.may_become(*_OPENERS):
            return False
        return self._give_back()

    def _calls(self) -> bool:
        """Between the invokes of a block."""
        scanner = self._scanner
        self._hold(scanner.take_space())
        if scanner.starts_with(INVOKE):
            return self._open_invoke()
        if self._block_has_calls and scanner.take_literal(*END_BLOCKS):
            self._held.clear()
            return self._go(self._after)
        if scanner.empty or scanner.may_become(INVOKE, *END_BLOCKS):
            return False
        return self._go(self._after) if self._block_has_calls else self._give_back()

    def _open_invoke(self) -> bool:
        tag = self._read_tag(_INVOKE_TAG)
        if tag is None:
            return False
        if not tag:
            self._hold(self._scanner.take(len(INVOKE)))
            return self._give_back()
        self._call.prepare(tag["name"])
        return self._go(self._invoke)

    def _invoke(self) -> bool:
        """Between the parameters of a call."""
        scanner = self._scanner
        self._hold(scanner.take_space())
        if scanner.starts_with(PARAMETER):
            return self._open_parameter()
        if scanner.take_literal(END_INVOKE) or scanner.starts_with(INVOKE, *END_BLOCKS):
            return self._close_call()
        if not self._call.began and scanner.starts_with("{"):
            return self._go(self._body)
        if scanner.empty or scanner.may_become(PARAMETER, END_INVOKE, INVOKE, *END_BLOCKS):
            return False
        return self._give_back()

    def _open_parameter(self) -> bool:
        tag = self._read_tag(_PARAMETER_TAG)
        if tag is None:
            return False
        if not tag:
            return self._give_back()
        self._held.clear()
        self._value_is_text = tag["is_text"] == "true"
        self._scalar_types = self._types.scalar(self._call.name, tag["name"])
        self._call.key(tag["name"])
        if self._value_is_text and not self._scalar_types:
            self._call.write('"')
            return self._go(self._string)
        return self._go(self._buffered)

    def _string(self) -> bool:
        """A text value, passed on as it arrives."""
        text, closed = self._scanner.take_until(END_PARAMETER)
        self._call.write_inside_string(text)
        if closed:
            self._scanner.take(len(END_PARAMETER))
            self._call.write('"')
            self._go(self._invoke)
        return closed

    def _buffered(self) -> bool:
        """A value whose form is known at its end only."""
        text, closed = self._scanner.take_until(END_PARAMETER)
        self._value.append(text)
        if closed:
            self._scanner.take(len(END_PARAMETER))
            self._call.write(self._buffered_value())
            self._go(self._invoke)
        return closed

    def _body(self) -> bool:
        """A JSON object where the parameters should be."""
        text, closed = self._scanner.take_until(END_INVOKE)
        self._value.append(text)
        if not closed:
            return False
        body = self._take_value()
        if not is_json_object(body):
            self._hold(body)
            return self._give_back()
        self._scanner.take(len(END_INVOKE))
        return self._close_call(body.strip())

    # The ends. `cut` leaves a call without its end: it must not look complete.

    def _end_calls(self, cut: bool) -> None:
        """A closing tag that is cut short is markup still; anything else is content."""
        rest = self._scanner.peek(_LONGEST_TAG)
        if not self._block_has_calls or not any(tag.startswith(rest) for tag in END_BLOCKS):
            self._give_back_all()

    def _end_invoke(self, cut: bool) -> None:
        rest = self._scanner.peek(_LONGEST_TAG)
        if cut:
            self._call.begin()
        elif any(tag.startswith(rest) for tag in (END_INVOKE, *END_BLOCKS)):
            self._close_call()
        else:
            self._give_back_all()

    def _end_string(self, cut: bool) -> None:
        self._call.write_inside_string(self._scanner.take())
        if not cut:
            self._call.write('"')
            self._close_call()

    def _end_buffered(self, cut: bool) -> None:
        self._value.append(self._scanner.take())
        if cut:
            self._call.write(self._take_value().strip())
        else:
            self._call.write(self._buffered_value())
            self._close_call()

    def _end_body(self, cut: bool) -> None:
        body = self._take_value() + self._scanner.take()
        if is_json_object(body):
            self._close_call(body.strip())
        elif cut:
            self._call.begin()
            self._call.write(body.strip())
        else:
            self._hold(body)
            self._give_back_all()

    # What the states share.

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _read_tag(self, pattern: re.Pattern[str]) -> dict[str, str] | None:
        """Attributes of the tag that comes next: None while it may grow, empty if it is none."""
        window = self._scanner.peek(_LONGEST_TAG)
        end = window.find('">', len(INVOKE))
        if end < 0:
            return None if len(window) < _LONGEST_TAG and "\n" not in window else {}
        match = pattern.fullmatch(window, 0, end + 2)
        if match is None:
            return {}
        self._hold(self._scanner.take(end + 2))
        return match.groupdict()

    def _hold(self, text: str) -> None:
        if not self._held:
            self._held_start = self._scanner.place - len(text)
        if text:
            self._held.append(text)

    def _give_back(self) -> bool:
        """Markup that is none: what was held is content."""
        if text := "".join(self._held):
            self._events.append(ContentText(text, self._held_start))
        self._held.clear()
        return self._go(self._content)

    def _give_back_all(self) -> None:
        self._hold(self._scanner.take())
        self._give_back()

    def _close_call(self, json_object: str | None = None) -> bool:
        self._held.clear()
        if json_object is None:
            self._call.close()
        else:
            self._call.close_with(json_object)
        self._block_has_calls = True
        return self._go(self._calls)

    def _buffered_value(self) -> str:
        text = self._take_value()
        return typed_value(text, self._scalar_types) if self._value_is_text else json_value(text)

    def _take_events(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events

    def _take_value(self) -> str:
        text = "".join(self._value)
        self._value.clear()
        return text

    def _emit_content(self, text: str, num_read: int | None = None) -> None:
        """`num_read` characters were read, of which `text` are the first."""
        if text:
            start = self._scanner.place - (len(text) if num_read is None else num_read)
            self._events.append(ContentText(text, start))
