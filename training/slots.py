"""The word stock, and random slot values that know on which side of the held-out split they fall.

Every document is a template filled with slot values. The split is made by a hash of those values,
so a held-out document was never seen word for word, whatever the seed or the number of workers.
"""

from __future__ import annotations

import random
import re
import zlib
from functools import cache
from pathlib import Path
from string import Formatter

WORDS = Path(__file__).parent / "words"
HELD_OUT_SHARE = 20
# Share of invented words among these, so that words nobody listed can be copied too.
INVENTED = {"names": 0.06, "cities": 0.08, "things": 0.04, "foods": 0.04, "codewords": 0.04}

# Slot name in a template -> section of the stock.
SECTIONS = {
    "action": "actions",
    "animal": "animals",
    "city": "cities",
    "code": "codewords",
    "colour": "colours",
    "day": "days",
    "food": "foods",
    "job": "jobs",
    "month": "months",
    "mood": "moods",
    "name": "names",
    "place": "places",
    "plant": "plants",
    "quality": "qualities",
    "subject": "subjects",
    "thing": "things",
    "verb": "verbs",
    "weather": "weather",
}


@cache
def sections(file: str) -> dict[str, list[str]]:
    """`[section]` headers with their lines."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (WORDS / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            lines = found.setdefault(line.strip("[]"), [])
        elif line.strip():
            lines.append(line)
    return found


@cache
def words(section: str) -> tuple[str, ...]:
    """The comma-separated words of one section of lists.txt."""
    joined = ",".join(sections("lists.txt")[section])
    return tuple(dict.fromkeys(word.strip() for word in joined.split(",") if word.strip()))


@cache
def pairs(section: str) -> tuple[tuple[str, str], ...]:
    """The `left | right` lines of one section of pairs.txt."""
    split = (line.split(" | ", 1) for line in sections("pairs.txt")[section])
    return tuple((left.strip(), right.strip()) for left, right in split)


@cache
def templates(file: str) -> tuple[str, ...]:
    """One template a line."""
    return tuple((WORDS / file).read_text(encoding="utf-8").splitlines())


@cache
def fields_of(template: str) -> tuple[str, ...]:
    """The distinct slot names of a template."""
    return tuple(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name))


def with_articles(text: str) -> str:
    """Write "an" before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeioAEIO])", r"\1n ", text)


class Slots:
    """A random source that records every value it hands out."""

    def __init__(self, seed: int | str):
        self.rng = random.Random(seed)
        self.drawn: list[str] = []

    def record(self, value: str) -> str:
        """Make a value part of the split's hash."""
        self.drawn.append(value)
        return value

    def pick(self, section: str) -> str:
        """One word of a section of lists.txt."""
        return self.record(self.word(section))

    def word(self, section: str) -> str:
        """A word of the section, or now and then an invented one in its place."""
        if not self.chance(INVENTED.get(section, 0.0)):
            return self.rng.choice(words(section))
        invented = "".join(self.rng.choices(words("syllables"), k=self.rng.randint(2, 3)))
        return invented.capitalize() if section in ("names", "cities") else invented

    def pair(self, section: str) -> tuple[str, str]:
        """One line of a section of pairs.txt."""
        left, right = self.rng.choice(pairs(section))
        self.record(left)
        return left, right

    def number(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        value = self.rng.randint(low, high)
        self.record(str(value))
        return value

    def digits(self, count: int) -> str:
        """A string of digits, zeros allowed anywhere."""
        return self.record("".join(self.rng.choices("0123456789", k=count)))

    def invented(self, low: int = 2, high: int = 3) -> str:
        """A word that does not exist, of `low` to `high` syllables."""
        return self.record(
            "".join(self.rng.choices(words("syllables"), k=self.rng.randint(low, high)))
        )

    def chance(self, probability: float) -> bool:
        """A coin that leaves no trace in the split."""
        return self.rng.random() < probability

    def one_of(self, *options: str) -> str:
        """A phrasing, likewise without trace."""
        return self.rng.choice(options)

    def fill(self, template: str, **given: str) -> tuple[str, dict[str, str]]:
        """The filled template, and the value of each slot; two slots of a kind differ."""
        values = dict(given)
        for name in fields_of(template):
            while name not in values:
                value = self.word(SECTIONS[name.rstrip("2")])
                if value not in values.values():
                    values[name] = self.record(value)
        return with_articles(template.format_map(values)), values

    def sentence(self) -> str:
        """A sentence that means nothing for any question."""
        return self.fill(self.rng.choice(templates("filler.txt")))[0]

    @property
    def held_out(self) -> bool:
        """Which side of the split the values drawn so far fall on."""
        return zlib.crc32("|".join(self.drawn).encode()) % HELD_OUT_SHARE == 0
