"""Small tasks with one right answer: arithmetic, lists, copying, JSON, tool calls."""

from __future__ import annotations

from collections.abc import Callable

from .chat_format import Chat, Turn, dump
from .slots import Slots, words
from .talk import Exchange, exchange

OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("plus", lambda a, b: a + b),
    "-": ("minus", lambda a, b: a - b),
    "*": ("times", lambda a, b: a * b),
}


def calculation(slots: Slots) -> tuple[int, str, int, int]:
    """Two numbers, a sign and the result; never below zero, factors up to ten."""
    sign = slots.one_of("+", "+", "-", "*")
    high = 10 if sign == "*" else slots.rng.choice((10, 50, 99))
    a, b = slots.number(0, high), slots.number(0, high)
    if sign == "-" and a < b:
        a, b = b, a
    return a, sign, b, OPERATIONS[sign][1](a, b)


def arithmetic(slots: Slots) -> Exchange:
    """One sum, difference or product."""
    a, sign, b, result = calculation(slots)
    spoken = f"{a} {OPERATIONS[sign][0]} {b}"
    asked = f"{a} {sign} {b}"
    ask = slots.one_of(f"What is {asked}?", f"What is {spoken}?", f"Calculate {asked}.")
    return exchange(ask, f"{a} {sign} {b} = {result}.")


def thought(slots: Slots) -> Chat:
    """A question that is first reasoned about, in thinking mode."""
    if slots.chance(0.5):
        a, sign, b, result = calculation(slots)
        reasoning = f"The user wants to know {a} {sign} {b}. {a} {sign} {b} = {result}."
        question, answer = f"What is {a} {sign} {b}?", f"The result is {result}."
    else:
        items = chosen(slots, 3, 6)
        number = len(items)
        reasoning = "Let me count. " + ", ".join(f"{i} {w}" for i, w in enumerate(items, 1)) + "."
        question = f"How many words are in this list? {', '.join(items)}"
        answer = f"There are {number} words in the list."
    turn = Turn("assistant", answer, reasoning=reasoning)
    return Chat([Turn("user", question), turn], thinking=True)


def chosen(slots: Slots, low: int, high: int, section: str = "things") -> list[str]:
    """Different words of one section."""
    items = slots.rng.sample(words(section), slots.rng.randint(low, high))
    # Now and then a word cut short: not in the stock, but like the words that are.
    items = [item[:-1] if len(item) > 3 and slots.chance(0.06) else item for item in items]
    for item in items:
        slots.record(item)
    return items


def listing(slots: Slots) -> Exchange:
    """Sort, reverse, count, first, last."""
    items = chosen(slots, 3, 7, slots.one_of("things", "animals", "foods", "names"))
    given, count = ", ".join(items), f"There are {len(items)} words in the list."
    ask, answer = slots.rng.choice(
        (
            (f"Sort these words: {given}", ", ".join(sorted(items))),
            (f"Reverse this list: {given}", ", ".join(reversed(items))),
            (f"How many words are in this list? {given}", count),
            (f"What is the first word of this list? {given}", f"The first word is {items[0]}."),
            (f"What is the last word of this list? {given}", f"The last word is {items[-1]}."),
        )
    )
    return exchange(ask, answer)


def copying(slots: Slots) -> Exchange:
    """Repeat words, invented words, digits or a sentence exactly."""
    kind = slots.rng.randrange(5)
    if kind == 0:
        text = " ".join(chosen(slots, 3, 20, slots.one_of("things", "codewords", "names")))
    elif kind == 1:
        text = " ".join(slots.invented() for _ in range(slots.rng.randint(2, 12)))
    elif kind == 2:
        text = slots.digits(slots.rng.randint(3, 16))
    elif kind == 3:
        text = " ".join(slots.sentence() for _ in range(slots.rng.randint(1, 4)))
    else:
        parts = (slots.pick("codewords"), slots.digits(2), slots.invented())
        text = "-".join(slots.rng.sample(parts, slots.rng.randint(2, 3)))
    ask = slots.one_of("Repeat this:", "Copy this text:", "Say exactly:", "Repeat after me:")
    turns = exchange(f"{ask} {text}", text)
    if slots.chance(0.3):
        turns += exchange(slots.one_of("Again, please.", "Once more."), text)
    return turns


def tracking(slots: Slots) -> Exchange:
    """Where is the thing now?"""
    thing, place = slots.pick("things"), slots.pick("places")
    lines = [f"The {thing} is in the {place}."]
    for _ in range(slots.rng.randint(1, 4)):
        if slots.chance(0.6):
            place = slots.pick("places")
            lines.append(f"{slots.pick('names')} moves the {thing} to the {place}.")
        else:
            lines.append(f"{slots.pick('names')} goes to the {slots.pick('places')}.")
    return exchange(f"{' '.join(lines)} Where is the {thing}?", f"The {thing} is in the {place}.")


def record(slots: Slots) -> tuple[str, dict[str, object]]:
    """A described person or thing, and the same as a dictionary."""
    fields: list[tuple[str, object]] = [
        ("age", slots.number(1, 99)),
        ("city", slots.pick("cities")),
        ("job", slots.pick("jobs")),
        ("colour", slots.pick("colours")),
        ("food", slots.pick("foods")),
    ]
    kept = slots.rng.sample(fields, slots.rng.randint(1, 4))
    values: dict[str, object] = {"name": slots.pick("names"), **dict(kept)}
    said = [f"{key} {value}" for key, value in values.items()]
    return ", ".join(said), values


def json_object(slots: Slots) -> Exchange:
    """A JSON object, or a list, from a description; or a value read back from one."""
    if slots.chance(0.25):
        items = chosen(slots, 2, 5, slots.one_of("things", "animals", "foods"))
        return exchange(f"Write a JSON list with these words: {', '.join(items)}", dump(items))
    said, values = record(slots)
    if slots.chance(0.25):
        key = slots.rng.choice(list(values))
        return exchange(f"{dump(values)}\n\nWhat is the {key}?", f"The {key} is {values[key]}.")
    ask = slots.one_of("Write a JSON object with", "Answer in JSON:", "Turn this into JSON:")
    return exchange(f"{ask} {said}", dump(values))


def schema(name: str, about: str, **parameters: str) -> dict[str, object]:
    """A tool as the API takes it; parameters map a name to its JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    shape = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": about, "parameters": shape}


SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful Assistant.",
    "You are a friendly and brief assistant.",
    "Answer the questions of the user.",
)
