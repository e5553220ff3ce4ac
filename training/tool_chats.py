"""Chats with tools in the V3.2 format: call, result, answer.

Tool and parameter names vary from chat to chat, so that the model has to read them in the system
prompt instead of remembering them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .chat_format import Call, Chat, Turn, dump
from .slots import Slots
from .talk import fact, greeting
from .tasks import SYSTEMS, arithmetic

Schema = dict[str, object]


@dataclass(frozen=True)
class Use:
    """A tool, the request for it, the calls, their results, and the answer made of them."""

    tool: Schema
    request: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    answer: str


def schema(name: str, about: str, /, **parameters: str) -> Schema:
    """A tool as the API takes it; parameters map a name to its JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    shape = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": about, "parameters": shape}


def weather(slots: Slots) -> Use:
    """The weather of one city or of two at once."""
    name = slots.one_of("get_weather", "get_weather", "weather", "current_weather")
    key = slots.one_of("city", "location", "place")
    tool = schema(
        name, slots.one_of("Get the weather of a city", "Get the weather"), **{key: "string"}
    )
    cities = [slots.pick("cities") for _ in range(slots.rng.choice((1, 1, 1, 2)))]
    calls, results, said = [], [], []
    for city in cities:
        sky, heat = slots.pick("weather"), slots.number(-5, 35)
        calls.append(Call(name, {key: city}))
        results.append(dump({key: city, "weather": sky, "temperature": heat}))
        said.append(f"It is {sky} in {city} and the temperature is {heat} degrees.")
    request = slots.one_of(
        "What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"
    )
    request = request.format(" and ".join(cities))
    return Use(tool, request, tuple(calls), tuple(results), " ".join(said))


def clock(slots: Slots) -> Use:
    """The time in a city."""
    name, key = slots.one_of("get_time", "time_in", "clock"), slots.one_of("city", "location")
    city, time = slots.pick("cities"), f"{slots.number(10, 23)}:{slots.number(10, 59)}"
    tool = schema(name, "Get the time in a city", **{key: "string"})
    result = dump({key: city, "time": time})
    call = Call(name, {key: city})
    return Use(tool, f"What time is it in {city}?", (call,), (result,), f"It is {time} in {city}.")


def addition(slots: Slots) -> Use:
    """A sum by tool."""
    name, a, b = slots.one_of("add", "sum", "calculate"), slots.number(1, 999), slots.number(1, 999)
    tool = schema(name, "Add two numbers", a="integer", b="integer")
    call = Call(name, {"a": a, "b": b})
    request = f"Use the tool to add {a} and {b}."
    return Use(tool, request, (call,), (str(a + b),), f"{a} + {b} = {a + b}.")


def timer(slots: Slots) -> Use:
    """A timer; the result has nothing to read."""
    name, minutes = slots.one_of("set_timer", "timer"), slots.number(1, 90)
    tool = schema(name, "Set a timer", minutes="integer")
    request = f"Set a timer for {minutes} minutes."
    answer = f"The timer is set for {minutes} minutes."
    return Use(tool, request, (Call(name, {"minutes": minutes}),), ("ok",), answer)


def message(slots: Slots) -> Use:
    """A message with free text."""
    name, to = slots.one_of("send_message", "send", "write_to"), slots.pick("names")
    text = slots.sentence() if slots.chance(0.5) else slots.one_of("I am late", "see you soon")
    tool = schema(name, "Send a message to a person", to="string", text="string")
    call = Call(name, {"to": to, "text": text})
    request = f'Send a message to {to}: "{text}"'
    return Use(tool, request, (call,), ("sent",), f"I have sent the message to {to}.")


def lookup(slots: Slots) -> Use:
    """A tool of an unheard-of name, used by name."""
    word, key = slots.pick("things").replace(" ", "_"), slots.one_of("name", "query", "id", "word")
    name = slots.one_of("find", "get", "lookup", "search") + "_" + word
    value, found = slots.invented(), slots.digits(3)
    tool = schema(name, f"Find a {word}", **{key: "string"})
    request = slots.one_of(f"Find the {word} {value}.", f"Use {name} for {value}.")
    call = Call(name, {key: value})
    return Use(tool, request, (call,), (dump({"result": found}),), f"The result is {found}.")


USES: tuple[Callable[[Slots], Use], ...] = (
    weather,
    weather,
    clock,
    addition,
    timer,
    message,
    lookup,
)


def tool_chat(slots: Slots) -> Chat:
    """A chat with one to three tools; sometimes a question that needs none of them."""
    use = slots.rng.choice(USES)(slots)
    others = [slots.rng.choice(USES)(slots).tool for _ in range(slots.rng.choice((0, 0, 1, 2)))]
    tools = {str(tool["name"]): tool for tool in (*others, use.tool)}
    listed = list(tools.values())
    slots.rng.shuffle(listed)
    thinking = slots.chance(0.2)
    name = use.calls[0].name
    turns = [
        Turn("user", use.request),
        Turn("assistant", calls=use.calls, reasoning=f"I should call {name}."),
        Turn("tool", results=use.results),
        Turn("assistant", use.answer, reasoning="I have the result."),
    ]
    if slots.chance(0.2):
        turns = slots.rng.choice((arithmetic, fact, greeting))(slots)
        thinking = False
    if slots.chance(0.5):
        turns = [Turn("system", slots.one_of(*SYSTEMS)), *turns]
    return Chat(turns, tools=listed, thinking=thinking, context_weight=0.02)
