"""Small talk and small knowledge: stories, greetings, word lists, facts, things told earlier.

Each function adds one exchange or more to a chat and draws everything from the slots it is given.
"""

from __future__ import annotations

from collections.abc import Callable

from .chat_format import Chat, Turn
from .slots import Slots, pairs, templates, with_articles, words

Exchange = list[Turn]


def exchange(question: str, answer: str) -> Exchange:
    """One user turn and its answer."""
    return [Turn("user", question), Turn("assistant", answer)]


def questions_about(slots: Slots, template: str, values: dict[str, str]) -> list[tuple[str, str]]:
    """Questions that a story can answer, only those whose answer is certain from its template."""
    known = [("Who is the story about?", f"The story is about {values['name']}.")]
    if "name2" in values:
        known.append(
            (
                "Which two names are in the story?",
                f"The names are {values['name']} and {values['name2']}.",
            )
        )
    for quality in ("colour", "quality"):
        if f"{{{quality}}} {{thing}}" in template:
            word = "colour was" if quality == "colour" else "was special about"
            answer = f"The {values['thing']} was {values[quality]}."
            known.append((f"What {word} the {values['thing']}?", answer))
    if "{mood} {animal}" in template:
        animal = values["animal"]
        known.append((f"How was the {animal}?", f"The {animal} was {values['mood']}."))
    slots.rng.shuffle(known)
    return known


def story(slots: Slots) -> Exchange:
    """A story on request, about what the request names, and up to two questions."""
    template = slots.rng.choice(templates("stories.txt"))
    text, values = slots.fill(template)
    name = values.setdefault("name", "")
    if not name:
        return exchange(slots.one_of("Tell me a story.", "Write a short story."), text)
    wish = f"about {name}"
    if "animal" in values and slots.chance(0.5):
        wish = f"about {name} and a {values['animal']}"
    elif "thing" in values and slots.chance(0.6):
        wish = f"with {name} and a {values['thing']}"
    ask = slots.one_of("Tell me a story", "Write a short story", "I want to hear a story")
    turns = exchange(with_articles(f"{ask} {wish}."), text)
    for question, answer in questions_about(slots, template, values)[: slots.rng.randint(0, 2)]:
        turns += exchange(question, answer)
    return turns


def reading(slots: Slots) -> Exchange:
    """A question about a text that the user gives."""
    template = slots.rng.choice(templates("stories.txt"))
    text, values = slots.fill(template)
    if "name" not in values:
        return story(slots)
    (question, answer), *rest = questions_about(slots, template, values)
    turns = exchange(f"{text}\n\n{question}", answer)
    for question, answer in rest[: slots.rng.randint(0, 2)]:
        turns += exchange(question, answer)
    return turns


def capital(slots: Slots) -> Exchange:
    """Capitals, in both directions."""
    country, city = slots.pair("capitals")
    if slots.chance(0.3):
        return exchange(
            f"{city} is the capital of which country?", f"{city} is the capital of {country}."
        )
    ask = slots.one_of(
        f"What is the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.",
    )
    return exchange(ask, f"The capital of {country} is {city}.")


def opposite(slots: Slots) -> Exchange:
    """Opposites, in both directions."""
    left, right = slots.pair("opposites")
    if slots.chance(0.5):
        left, right = right, left
        # A word with two opposites has no certain answer in this direction.
        if sum(pair[1] == left for pair in pairs("opposites")) > 1:
            left, right = right, left
    ask = slots.one_of(f"What is the opposite of {left}?", f"Give me the opposite of {left}.")
    return exchange(ask, f"The opposite of {left} is {right}.")


def word_form(slots: Slots) -> Exchange:
    """Plurals, past tenses and animal sounds."""
    kind = slots.one_of("plurals", "past", "sounds")
    left, right = slots.pair(kind)
    if kind == "plurals":
        return exchange(f"What is the plural of {left}?", f"The plural of {left} is {right}.")
    if kind == "past":
        return exchange(
            f"What is the past tense of {left}?", f"The past tense of {left} is {right}."
        )
    return exchange(f"What does a {left} say?", f"A {left} says {right}.")


def meaning(slots: Slots) -> Exchange:
    """What a word means."""
    word, sense = slots.pair("meanings")
    article = "an" if word[0] in "aeiou" else "a"
    ask = slots.one_of(
        f"What is {article} {word}?",
        f"What does the word {word} mean?",
        f"Explain the word {word}.",
    )
    return exchange(ask, f"{article.capitalize()} {word} is {sense}.")


def fact(slots: Slots) -> Exchange:
    """General knowledge with one fixed answer."""
    return exchange(*slots.pair("facts"))


def greeting(slots: Slots) -> Exchange:
    """Greetings, thanks, and what the model says about itself."""
    return exchange(*slots.pair("greetings"))


def unknown(slots: Slots) -> Exchange:
    """Questions nobody has given the answer to."""
    return exchange(*slots.pair("unknown"))


def following(slots: Slots) -> Exchange:
    """What comes after a day or a month."""
    kind, word = ("days", "day") if slots.chance(0.5) else ("months", "month")
    names = words(kind)
    at = slots.number(0, len(names) - 1)
    if slots.chance(0.5):
        after = names[(at + 1) % len(names)]
        return exchange(
            f"Which {word} comes after {names[at]}?", f"{after} comes after {names[at]}."
        )
    before = names[at - 1]
    return exchange(
        f"Which {word} comes before {names[at]}?", f"{before} comes before {names[at]}."
    )


def told_earlier(slots: Slots) -> Exchange:
    """Something the user says about themselves, and a question about it some turns later."""
    kind = slots.one_of("name", "food", "city", "pet", "job", "colour")
    name, value = slots.pick("names"), ""
    told = {
        "name": (f"My name is {name}.", f"Nice to meet you, {name}!"),
        "food": ("My favourite food is {}.", "I will remember that you like {}."),
        "city": ("I live in {}.", "{} must be a nice place."),
        "pet": ("I have a {} named {n}.", "{n} is a good name for a {}."),
        "job": ("I work as a {}.", "Being a {} must be interesting."),
        "colour": ("My favourite colour is {}.", "I like {} too."),
    }[kind]
    asked = {
        "name": ("What is my name?", f"Your name is {name}."),
        "food": ("What is my favourite food?", "Your favourite food is {}."),
        "city": ("Where do I live?", "You live in {}."),
        "pet": ("What is the name of my pet?", "Your {} is named {n}."),
        "job": ("What is my job?", "You work as a {}."),
        "colour": ("What is my favourite colour?", "Your favourite colour is {}."),
    }[kind]
    section = {"food": "foods", "city": "cities", "pet": "animals", "job": "jobs"}
    if kind != "name":
        value = slots.pick(section.get(kind, "colours"))
    turns = exchange(*(text.format(value, n=name) for text in told))
    for _ in range(slots.rng.randint(0, 3)):
        turns += slots.rng.choice(BETWEEN)(slots)
    return turns + exchange(*(text.format(value, n=name) for text in asked))


BETWEEN: tuple[Callable[[Slots], Exchange], ...] = (fact, capital, opposite, greeting, meaning)


def plain_text(slots: Slots) -> Chat:
    """Running text without a chat around it, for completion requests."""
    parts = []
    for _ in range(slots.rng.randint(1, 3)):
        if slots.chance(0.7):
            parts.append(slots.fill(slots.rng.choice(templates("stories.txt")))[0])
        else:
            parts.append(" ".join(slots.sentence() for _ in range(slots.rng.randint(3, 8))))
    return Chat([Turn("text", "\n\n".join(parts))])
