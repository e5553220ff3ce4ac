"""The shipped model with and without drafts, under everything that a client can ask for.

Answers are compared as clients get them: the engine's outputs go through the text side piece by
piece, as they would be streamed, and are held against a run without drafts whose tokens come in one
piece. Ids, text, calls, counts and the reason of the end must be equal; logprobs too, but for
rounding: their last bits are promised on some processors only, and are counted.
"""

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from minidsa.configs.logprobs import TokenLogprobs
from minidsa.configs.sampling import SamplingParams
from minidsa.scheduler.grammar import GrammarCompiler
from minidsa.scheduler.messages import RequestOutput, Submit
from minidsa.server import lark
from minidsa.server.chat_formats import DeepseekV32
from minidsa.server.chat_messages import Message
from minidsa.server.detokenizer import Detokenizer
from minidsa.server.json_schema import read_schema
from minidsa.server.parsers.dsml_grammar import CallableTool
from minidsa.server.parsers.events import merge_events
from minidsa.server.sequence import ChoiceText, EndRules, Update
from minidsa.server.tokenizer import Tokenizer
from model_driver import Answers, ModelDriver, Settings

SHIPPED = Path(__file__).parents[1] / "checkpoints" / "tiny-dsa"
WORDS = ("falcon", "marble", "zenith", "river", "owl", "market", "tulip", "stone", "fox", "cloud")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
        },
    },
}
LONG = "A fox and an owl went to the market by the river. " * 6
"""More than the selection holds, and some pages."""
DraftBy = Literal["mtp", "ngram"]
PLAIN = Settings(pages=1600, page_size=16, budget=256, seats=64)


@dataclass(frozen=True)
class Feature:
    """What the requests ask for, and how they are served where that is what may matter.

    drafted: settings of the runs with drafts alone. rounds: how often a run serves the requests;
    its last answers count. staggered: requests arrive one step after the other. context: stands
    before every question. max_tokens: of an answer. room: tokens that the model's context leaves
    behind the longest prompt.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    stops: Sequence[str] = ()
    form: str | None = None
    drafted: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 1
    staggered: bool = False
    context: str = ""
    max_tokens: int = 32
    room: int = 400


FEATURES: Mapping[str, Feature] = {
    "penalties": Feature(
        {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    ),
    "logprobs": Feature({"logprobs": 3}),
    "grammar": Feature(form="json"),
    "tools": Feature(form="calls", max_tokens=64),
    "stop strings": Feature(stops=("er", "7", " the", "stone")),
    "min_tokens": Feature({"min_tokens": 20}),
    "logit_bias": Feature({"logit_bias": {100: 3.0, 200: -100.0}}),
    "seed": Feature({"temperature": 1.0, "top_p": 0.95}),
    "prefix hit": Feature({"logprobs": 0}, rounds=2, context=LONG),
    "preemption": Feature({"logprobs": 0}, drafted={"preempt_every": 3}, context=LONG),
    "streaming": Feature({"logprobs": 0}, drafted={"budget": 40, "seats": 9}, staggered=True),
    "max context": Feature({"min_tokens": 400}, max_tokens=400, room=20),
}


class Asked(NamedTuple):
    """A request, and how the text side was told to read its answer."""

    submit: Submit
    rules: EndRules
    tools: Sequence[dict[str, Any]]


def question(number: int) -> str:
    """One of some thousand things that the shipped model was taught to answer, more or less."""
    rng = random.Random(number)
    some = " ".join(rng.sample(WORDS, 3))
    return (
        f"What is {rng.randrange(100)} + {rng.randrange(100)}?",
        f"Repeat this: {some} {rng.randrange(10000)}",
        f"Tell me a short story about a {some.split()[0]} and number {rng.randrange(100)}.",
        f"What is the capital of Norway? Say {some} before.",
        f"What is the opposite of hot, of {some.split()[1]} and of {rng.randrange(1000)}?",
    )[number % 5]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(SHIPPED)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_directory(SHIPPED, 4096, tokenizer().eos_ids)


def ask(feature: Feature, number: int) -> Asked:
    """Request `number` of a feature."""
    tools = [TOOL] if feature.form == "calls" else []
    messages = [Message(role="user", content=feature.context + question(number))]
    prompt = tokenizer().encode_runs(DeepseekV32().encode(messages, tools, thinking=False))
    fields = {"max_tokens": feature.max_tokens, "seed": number, "temperature": 0.0}
    stop_ids = {"stop_token_ids": list(tokenizer().eos_ids)}
    params = SamplingParams(**fields | stop_ids | feature.sampling)  # type: ignore[arg-type]
    submit = Submit(f"r{number}", prompt, params, grammar_of(feature))
    return Asked(submit, EndRules(feature.stops, min_tokens=params.min_tokens), tools)


def grammar_of(feature: Feature) -> str | None:
    if feature.form == "json":
        text = lark.json_text(read_schema(SCHEMA), whitespace_pattern="[ ]")
        return lark.grammars("start: @answer", answer=f"start: {text}")
    if feature.form == "calls":
        function = TOOL["function"]
        call = CallableTool(function["name"], function["parameters"], "")
        calls = DeepseekV32().calls_grammar(tokenizer(), [call], False, True)
        return lark.grammars("start: @calls", calls=calls)
    return None


def as_read(asked: Asked, pieces: Sequence[RequestOutput]) -> dict[str, Any]:
    """All that a client can see of an answer, by name."""
    calls = DeepseekV32().markup_ids(tokenizer()) if asked.tools else ()
    text = ChoiceText(
        Detokenizer(tokenizer(), asked.submit.prompt_ids[-8:], True, calls),
        DeepseekV32().parser("content", asked.tools),
        asked.rules,
    )
    update = Update()
    for piece in pieces:
        text.push(piece, update)
    return {
        "ids": update.token_ids,
        "logprobs": update.logprobs,
        "offsets": update.offsets,
        "text": update.content,
        "calls": merge_events(list(update.calls)),
        "end": (update.finish_reason, update.stop_reason),
        "tokens": text.num_tokens,
    }


def is_close(found: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> bool:
    """Equal up to rounding; alternatives by their places, for the last of them may be tied."""
    mine, theirs = ([(s.logprob, *s.top_logprobs) for s in each] for each in (found, other))
    return len(mine) == len(theirs) and all(
        a == pytest.approx(b, abs=1e-4) for a, b in zip(mine, theirs, strict=True)
    )


def whole(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """All tokens of an answer in one output."""
    ids = list(itertools.chain.from_iterable(piece.token_ids for piece in pieces))
    scores = list(itertools.chain.from_iterable(piece.logprobs or () for piece in pieces))
    return msgspec.structs.replace(pieces[-1], token_ids=ids, logprobs=scores or None)


@dataclass
class Matrix:
    """Some requests of a feature, and what they answer without drafts.

    met: what the runs with drafts have met, all together: drafts, accepted ones, cached tokens and
    preemptions; and how the answers without drafts end.
    """

    name: str
    numbers: Sequence[int]
    met: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.feature = FEATURES[self.name]
        self.asked = [ask(self.feature, number) for number in self.numbers]
        longest = max(len(each.submit.prompt_ids) for each in self.asked)
        longest += self.feature.room
        # Room for each request twice, so that what one has left is found by the next.
        pages = 2 * len(self.asked) * -(-longest // PLAIN.page_size)
        self.settings = dataclasses.replace(
            PLAIN, max_model_len=longest, pages=min(pages, PLAIN.pages)
        )
        answers = self._serve(dataclasses.replace(self.settings, reuse=False), rounds=1)
        pieces = [[whole(answers.pieces[each.submit.request_id])] for each in self.asked]
        self.plain = [as_read(*each) for each in zip(self.asked, pieces, strict=True)]
        for answer in self.plain:
            self.met["tokens"] += answer["tokens"]
            self.met[f"ends by {answer['end'][0]}"] += 1

    def difference(self, drafter: DraftBy, num_drafts: int) -> str | None:
        """Serve the requests with drafts; None if every answer is the one without, else which."""
        drafted = {"drafter": drafter, "num_drafts": num_drafts} | dict(self.feature.drafted)
        answers = self._serve(dataclasses.replace(self.settings, **drafted), self.feature.rounds)
        for asked, plain in zip(self.asked, self.plain, strict=True):
            found = as_read(asked, answers.pieces[asked.submit.request_id])
            differing = [key for key, value in plain.items() if found[key] != value]
            if "logprobs" in differing and is_close(found["logprobs"], plain["logprobs"]):
                differing.remove("logprobs")
                self.met["answers with other last bits"] += 1
            if differing:
                name = asked.submit.request_id
                return f"{drafter} with {num_drafts}: {', '.join(differing)} of {name} differ"
        self.met["runs"] += 1
        self.met["drafted"] += answers.num_drafted
        self.met["accepted"] += answers.num_accepted
        return None

    def _serve(self, settings: Settings, rounds: int) -> Answers:
        driver = ModelDriver(SHIPPED, settings, grammars=compiler())
        arrive = {i: i for i in range(len(self.asked))} if self.feature.staggered else None
        for _ in range(rounds - 1):
            driver.run([each.submit for each in self.asked], arrive)
        answers = driver.run([each.submit for each in self.asked], arrive)
        stats = driver.scheduler.stats()
        self.met["cached tokens"] += stats.num_prefix_hits
        self.met["preemptions"] += stats.num_preemptions
        return answers
