"""Stop strings over a stream of text.

The match that completes first ends the text, and of two that complete together the longer one. The
automaton of Aho and Corasick ("Efficient string matching", 1975) decides that one character at a
time, so the result cannot depend on how tokens split the text; its depth is the length of the
longest suffix that may still become a stop, which is what has to be held back. Time grows with the
text, plus at most the longest stop for each push.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop that was found. `start` and `end` count characters from the start of the text."""

    stop: str
    start: int
    end: int


class _Node:
    __slots__ = ("children", "depth", "fallback", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, _Node] = {}
        self.fallback: _Node | None = None
        self.stop: str | None = None


class StopMatcher:
    """Watches one text for stop strings; with `include` the stop stays in the text.

    `match` is None until a stop was found; nothing is shown after that. Raises ValueError for an
    empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._root = _automaton(stops)
        self._include = include
        self._node = self._root
        self._held = ""
        self._num_seen = 0
        self.match: StopMatch | None = None

    def fork(self) -> "StopMatcher":
        """A matcher for another text; what was built from the stop strings is shared."""
        twin = copy(self)
        twin._node, twin._held, twin._num_seen, twin.match = self._root, "", 0, None
        return twin

    def push(self, text: str, armed: bool = True) -> str:
        """The text that can be shown now.

        With `armed` false (before `min_tokens`) stops that complete in this text are let pass.
        """
        if self.match is not None:
            return ""
        for index, character in enumerate(text):
            self._node = self._step(character)
            if armed and self._node.stop is not None:
                return self._finish(self._node.stop, text[: index + 1])
        self._num_seen += len(text)
        pending = self._held + text
        split = len(pending) - self._node.depth
        self._held = pending[split:]
        return pending[:split]

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        text, self._held = self._held, ""
        self._node = self._root
        return text

    def _step(self, character: str) -> _Node:
        node = self._node
        while character not in node.children:
            if node.fallback is None:
                return node
            node = node.fallback
        return node.children[character]

    def _finish(self, stop: str, text: str) -> str:
        end = self._num_seen + len(text)
        self.match = StopMatch(stop, end - len(stop), end)
        pending = self._held + text
        self._held = ""
        return pending if self._include else pending[: len(pending) - len(stop)]


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        if not stop:
            raise ValueError("a stop string is empty")
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    level = [root]
    while level:
        level = [child for node in level for child in _link_children(node, root)]
    return root


def _link_children(node: _Node, root: _Node) -> list[_Node]:
    """Point each child to the node of its longest proper suffix; parents come first."""
    for character, child in node.children.items():
        suffix = node.fallback
        while suffix is not None and character not in suffix.children:
            suffix = suffix.fallback
        child.fallback = root if suffix is None else suffix.children[character]
        if child.stop is None:
            child.stop = child.fallback.stop
    return list(node.children.values())
