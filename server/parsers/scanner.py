"""The unread end of a text that arrives in pieces.

Parsers read it left to right and decide only on what no further piece can change, which makes
their events independent of where the pieces were cut. Text that is read is let go at once, so time
and memory do not grow with what lies behind.
"""

import re
from collections.abc import Sequence


class Scanner:
    """Text pushed but not read yet; `place` is where reading stands, counted from the start."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_dropped = 0

    @property
    def place(self) -> int:
        """Characters read so far."""
        return self._num_dropped + self._at

    @property
    def empty(self) -> bool:
        """Nothing is left to read."""
        return self._at == len(self._text)

    def push(self, text: str) -> None:
        """Append a piece."""
        self._num_dropped += self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    def move(self, place: int) -> None:
        """Where the next piece stands in the whole text, when something else read what is before.

        Only while nothing is left to read.
        """
        self._num_dropped = place - self._at

    def take(self, count: int | None = None) -> str:
        """Read `count` characters, or all."""
        end = len(self._text) if count is None else self._at + count
        text = self._text[self._at : end]
        self._at = min(end, len(self._text))
        return text

    def take_until(self, literal: str) -> tuple[str, bool]:
        """Read up to the literal, or up to what may still become it; the literal itself stays.

        Says whether the literal was found.
        """
        place = self._text.find(literal, self._at)
        if place >= 0:
            return self.take(place - self._at), True
        return self.take(self.num_safe((literal,))), False

    def take_literal(self, *literals: str) -> str:
        """Read whichever of the literals comes next; nothing where none does."""
        found = [literal for literal in literals if self.starts_with(literal)]
        return self.take(len(found[0])) if found else ""

    def take_space(self) -> str:
        """Read the white space that comes next."""
        end = self._at
        while end < len(self._text) and self._text[end].isspace():
            end += 1
        return self.take(end - self._at)

    def peek(self, limit: int) -> str:
        """At most `limit` of the next characters, without reading them."""
        return self._text[self._at : self._at + limit]

    def search(self, pattern: re.Pattern[str]) -> int | None:
        """Characters before the next match of the pattern."""
        match = pattern.search(self._text, self._at)
        return None if match is None else match.start() - self._at

    def starts_with(self, *literals: str) -> bool:
        """Whether one of the literals comes next, whole."""
        return self._text.startswith(literals, self._at)

    def may_become(self, *literals: str) -> bool:
        """Whether all that is left is the beginning of a literal, and not yet the whole of it."""
        longest = max(map(len, literals))
        rest = self.peek(longest)
        at_end = self._at + len(rest) == len(self._text)
        return at_end and any(lit.startswith(rest) and lit != rest for lit in literals)

    def num_safe(self, literals: Sequence[str]) -> int:
        """Characters before the longest end that may still become one of the literals."""
        firsts = {literal[0] for literal in literals}
        size = len(self._text)
        for place in range(max(self._at, size - max(map(len, literals)) + 1), size):
            if self._text[place] in firsts:
                end = self._text[place:]
                if any(literal.startswith(end) for literal in literals):
                    return place - self._at
        return size - self._at
