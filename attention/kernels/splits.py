"""How the keys of a step's queries are shared out among the multiprocessors of a GPU.

A decode has few queries and many keys: one program a query would leave most of the chip idle, so
the keys of a query are cut into parts. All parts of a step have the same number of tiles, but the
last one of a query; the number is chosen so that the last wave of programs is as full as can be.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .launch import ceil_div

# What a program costs besides its tiles (loading queries, writing a part that is read once more),
# in keys. An estimate from the bytes of each.
KEYS_WORTH_A_PROGRAM = 128
# More waves than this leave little to gain from an even last one.
MOST_WAVES = 3


@dataclass(frozen=True)
class Processors:
    """What runs parts: `at_once` programs, `per_part` of them (blocks of rows) for each part.

    tile: keys of a tile.
    """

    at_once: int
    per_part: int
    tile: int

    def tiles_per_part(self, queries: Mapping[int, int], most_parts: int | None = None) -> int:
        """The best length of a part, at least 1; queries: how many have that many tiles.

        most_parts: no more parts than this, or one a query if that is more.
        """
        total = sum(tiles * many for tiles, many in queries.items())
        longest = max(queries, default=1)
        lengths = {longest}
        for waves in range(1, MOST_WAVES + 1):
            length = ceil_div(total, max(1, waves * self.at_once // self.per_part))
            lengths |= {length, length + 1}
        fitting = [
            length
            for length in lengths
            if length < longest and (most_parts is None or _parts(length, queries) <= most_parts)
        ]
        # The longer one of two equals leaves fewer parts to join.
        choices = [max(1, length) for length in (*fitting, longest)]
        return min(choices, key=lambda length: (self._cost(length, queries), -length))

    def _cost(self, length: int, queries: Mapping[int, int]) -> int:
        """Time in tiles: waves of programs, each as long as a whole part."""
        waves = ceil_div(_parts(length, queries) * self.per_part, self.at_once)
        return waves * (length + KEYS_WORTH_A_PROGRAM // self.tile)


def _parts(length: int, queries: Mapping[int, int]) -> int:
    return sum(many * ceil_div(tiles, max(1, length)) for tiles, many in queries.items())
