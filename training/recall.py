"""Long documents with facts spread through them, and questions that only those facts answer.

This is what the indexer is trained and judged by: a question's fact lies hundreds or thousands of
tokens back, far outside `index_topk`, among text that resembles it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .chat_format import Chat, Turn
from .slots import Slots, words
from .talk import exchange

# Averages over the corpus, for planning how long a document gets.
CHARS_PER_TOKEN = 4.4
QUESTION_TOKENS = 34


class Fact(tuple[str, str, str, str]):
    """(key, statement, question, short answer); the long answer is the statement itself."""

    __slots__ = ()


def object_code(slots: Slots) -> Fact:
    """A number that belongs to a described object."""
    key = f"{slots.pick('qualities')} {slots.pick('things')}"
    value = slots.digits(4)
    said = f"The secret code of the {key} is {value}."
    return Fact((key, said, f"What is the secret code of the {key}?", value))


def hiding_place(slots: Slots) -> Fact:
    """Who keeps what where."""
    name, place = slots.pick("names"), slots.pick("places")
    thing = f"{slots.pick('colours')} {slots.pick('things')}"
    key = f"{name} {thing}"
    said = f"{name} keeps the {thing} in the {place}."
    return Fact((key, said, f"Where does {name} keep the {thing}?", place))


def password(slots: Slots) -> Fact:
    """A two-word secret of a one-word project."""
    key = slots.pick("codewords").capitalize()
    value = f"{slots.pick('colours')}-{slots.pick('codewords')}"
    said = f"The password of project {key} is {value}."
    return Fact((key, said, f"What is the password of project {key}?", value))


def phone(slots: Slots) -> Fact:
    """A person's number."""
    key, value = slots.pick("names"), f"{slots.digits(3)}-{slots.digits(3)}"
    said = f"The phone number of {key} is {value}."
    return Fact((key, said, f"What is the phone number of {key}?", value))


def favourite(slots: Slots) -> Fact:
    """A taste of somebody known by name and home."""
    key = f"{slots.pick('names')} from {slots.pick('cities')}"
    value = slots.pick("foods")
    said = f"The favourite food of {key} is {value}."
    return Fact((key, said, f"What is the favourite food of {key}?", value))


def entry(slots: Slots) -> Fact:
    """A line of a table with a name and a value that mean nothing."""
    key, value = slots.invented(), slots.one_of(slots.digits(3), slots.invented())
    return Fact((key, f"{key} = {value}", f"What is the value of {key}?", value))


PROSE: tuple[Callable[[Slots], Fact], ...] = (
    object_code,
    object_code,
    hiding_place,
    password,
    phone,
    favourite,
)


def different(slots: Slots, make: Callable[[], Fact], count: int) -> list[Fact]:
    """Facts with different keys; fewer where the stock does not hold that many."""
    found: dict[str, Fact] = {}
    for _ in range(count * 3):
        fact = make()
        found.setdefault(fact[0], fact)
        if len(found) == count:
            break
    return list(found.values())


def spread(slots: Slots, facts: list[Fact], tokens: int) -> str:
    """The statements at random places of a filler text of about `tokens` tokens."""
    budget = tokens * CHARS_PER_TOKEN - sum(len(fact[1]) for fact in facts)
    lines = []
    while budget > 0:
        lines.append(slots.sentence())
        budget -= len(lines[-1])
    # The end stays free of facts, so that none lies within reach of a sliding window.
    reach = max(len(lines) - 8, 0)
    for fact in facts:
        lines.insert(slots.rng.randint(0, reach), fact[1])
    return " ".join(lines)


def table(facts: list[Fact]) -> str:
    """The statements as lines."""
    return "\n".join(fact[1] for fact in facts)


def ask(slots: Slots, facts: list[Fact], brief: bool) -> list[Turn]:
    """One exchange a fact, in random order, answered by the statement or by the value alone."""
    turns = []
    for _, said, question, value in slots.rng.sample(facts, len(facts)):
        if brief:
            turns += exchange(f"{question} Answer with the value only.", value)
        else:
            turns += exchange(question, said)
    return turns


def recall(slots: Slots, tokens: int, style: str = "", questions: int = 12) -> Chat:
    """A chat of about `tokens` tokens that begins with the facts.

    `style` is drawn when not given: "prose" is answered by statements, "brief" by values alone,
    "table" has lines instead of prose.
    """
    style = style or slots.one_of("prose", "prose", "brief", "table")
    count = min(questions, max(1, tokens // 60))
    asked = slots.rng.randint(1, count)
    body = max(tokens - asked * QUESTION_TOKENS, 24)
    if style == "table":
        size = min(max(body // 9, 2), 300)
        facts = different(slots, lambda: entry(slots), size)
        text = slots.one_of("Here is a table.", "Remember these entries.") + "\n" + table(facts)
        facts = slots.rng.sample(facts, min(asked, len(facts)))
    else:
        kind = slots.rng.choice(PROSE)
        one_kind = slots.chance(0.4)
        facts = different(
            slots,
            lambda: (kind if one_kind else slots.rng.choice(PROSE))(slots),
            min(count, max(1, body // 18)),
        )
        text = spread(slots, facts, body)
        facts = facts[:asked]
    turns = ask(slots, facts, brief=style == "brief")
    first = turns[0].text
    shape = slots.rng.randrange(3)
    if shape == 0:
        turns = [Turn("system", text), *turns]
    elif shape == 1:
        turns[0] = Turn("user", f"{text}\n\n{first}")
    else:
        turns = exchange(text, slots.one_of("I will remember that.", "All right.")) + turns
    return Chat(turns, context_weight=0.03)


def repetition(slots: Slots, tokens: int) -> Chat:
    """Random words, twice: the plainest lesson in looking back."""
    pool = words("things") + words("codewords") + words("names") + words("foods")
    count = min(slots.rng.randint(8, 120), max(tokens // 4, 8))
    chunk = slots.rng.choices(pool, k=count) if slots.chance(0.5) else []
    while len(chunk) < count // 2:
        chunk.append(slots.invented())
    text = slots.record(" ".join(chunk))
    ask = slots.one_of("Repeat these words:", "Copy this list:")
    return Chat([*exchange(f"{ask} {text}", text)], context_weight=0.01)


def log_length(slots: Slots, low: int, high: int) -> int:
    """A length between the two, every doubling equally likely."""
    return int(math.exp(slots.rng.uniform(math.log(low), math.log(high))))
