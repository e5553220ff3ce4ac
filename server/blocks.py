"""An answer as a list of blocks: thoughts, text and calls, in the order the model wrote them.

Chat puts an answer's text, thoughts and calls in three fields; other protocols list them as blocks
that open, grow and close. Streams and whole answers read the same changes, so they cannot differ.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .parsers.events import CallArgs, CallStart
from .sequence import Part

Kind = Literal["reasoning", "text", "call"]
Act = Literal["open", "grow", "close"]


@dataclass
class Block:
    """`text` is all that came so far: of a call, the JSON of its arguments."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""

    def arguments(self) -> dict[str, Any] | None:
        """The arguments of a call; None where the answer was cut inside of them."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


class BlockList:
    """Collects the parts of one choice."""

    def __init__(self, call_prefix: str) -> None:
        """`call_prefix` begins the ids of calls to which the model gave none."""
        self._call_prefix = call_prefix
        self.blocks: list[Block] = []
        self._is_open = False

    def feed(self, parts: Iterable[Part]) -> Iterator[tuple[Act, Block, str]]:
        """What the parts change: blocks that open and close, and texts that blocks grow by."""
        for part in parts:
            match part:
                case CallStart(index, name, call_id):
                    yield from self.close()
                    made = call_id or f"{self._call_prefix}{index:02x}"
                    yield "open", self._add("call", name, made), ""
                case CallArgs():
                    yield self._grow(part.text)
                case _:
                    kind: Kind = "reasoning" if part.is_reasoning else "text"
                    if not self._is_open or self.blocks[-1].kind != kind:
                        yield from self.close()
                        yield "open", self._add(kind), ""
                    yield self._grow(part.text)

    def close(self) -> Iterator[tuple[Act, Block, str]]:
        """The end of the block that is open, if one is."""
        if self._is_open:
            self._is_open = False
            yield "close", self.blocks[-1], ""

    def _add(self, kind: Kind, name: str = "", call_id: str = "") -> Block:
        block = Block(kind, len(self.blocks), name=name, call_id=call_id)
        self.blocks.append(block)
        self._is_open = True
        return block

    def _grow(self, text: str) -> tuple[Act, Block, str]:
        block = self.blocks[-1]
        block.text += text
        return "grow", block, text
