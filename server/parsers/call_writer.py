"""Writes tool calls as events: arguments go out as JSON text, once, from left to right.

No partial JSON is parsed and nothing written is taken back. Each parameter adds its key, then its
value, so the pieces joined are a JSON object by construction.
"""

from .arguments import quoted
from .events import CallArgs, CallEnd, CallStart, Event


class CallWriter:
    """The calls of one answer, one at a time: `name` is the current one's.

    A call is announced late, with its first parameter or its end, as its markup may turn out to be
    none until then. `began` says whether that was done.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._index = -1
        self.name = ""
        self._num_parameters = 0
        self.began = False

    def prepare(self, name: str) -> None:
        """A new call, not announced yet."""
        self.name = name
        self._num_parameters = 0
        self.began = False

    def begin(self) -> None:
        """Announce the call, unless that was done."""
        if not self.began:
            self._index += 1
            self._events.append(CallStart(self._index, self.name))
            self.began = True

    def key(self, name: str) -> None:
        """Open a parameter; one given twice is written twice, and readers take the last."""
        self.begin()
        opening = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self.write(f"{opening}{quoted(name)}: ")

    def write(self, text: str) -> None:
        """The next piece of JSON."""
        if text:
            self._events.append(CallArgs(self._index, text))

    def write_inside_string(self, text: str) -> None:
        """The next piece of a text value, between the quotes."""
        self.write(quoted(text)[1:-1])

    def close(self) -> None:
        """End the object and the call."""
        self.begin()
        self.write("}" if self._num_parameters else "{}")
        self._events.append(CallEnd(self._index))

    def close_with(self, json_object: str) -> None:
        """The whole object at once, and the end of the call."""
        self.begin()
        self.write(json_object)
        self._events.append(CallEnd(self._index))
