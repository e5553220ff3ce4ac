"""Grammars without a model: any legal token may come, drawn from a seed and the position alone.

So whatever a grammar lets through comes up sooner or later, which a trained model would never show.
"""

import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from minidsa.configs.sampling import SamplingParams
from minidsa.model.sequence import SampleInput, SequenceInput, SequenceOutput, num_accepted
from minidsa.model.small_tokenizer import build_small_tokenizer
from minidsa.scheduler.grammar import GrammarCompiler, Matcher
from minidsa.scheduler.messages import Submit
from runners import AtOnce
from tokenizers_small import small_tokenizer

VOCAB = 512
EOS = 1
CLOSERS = ('"', "}", "]", "<", "/")
CLOSING_TOKENS = ("</think>", "｜DSML｜")


@cache
def small_compiler() -> GrammarCompiler:
    description = json.loads(build_small_tokenizer(VOCAB).to_str())
    return GrammarCompiler(description, VOCAB, [EOS])


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(build_small_tokenizer(VOCAB).to_str())


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 400, "seed": 0, "stop_token_ids": [EOS]} | fields)


def ids_of(text: str) -> list[int]:
    return small_tokenizer(VOCAB).encode_runs([text])


def text_of(ids: Sequence[int]) -> str:
    return small_tokenizer(VOCAB).decode([i for i in ids if i != EOS])


def legal_ids(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little") & (1 << VOCAB) - 1
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


@cache
def closing_ids() -> frozenset[int]:
    texts = small_tokenizer(VOCAB)
    return frozenset(
        {EOS, *texts.control_ids(CLOSING_TOKENS)}
        | {i for i in range(11, VOCAB) if texts.token_text(i).startswith(CLOSERS)}
    )


def control_id(literal: str) -> int:
    return small_tokenizer(VOCAB).control_ids([literal])[0]


def draw(mask: bytes, seed: int, position: int, close_after: int = 40) -> int:
    """A legal id; late in the text one that closes something, where there is any."""
    legal = legal_ids(mask)
    if position >= close_after:
        legal = [i for i in legal if i in closing_ids()] or legal
    return random.Random(f"{seed} {position}").choice(legal)


def walk(matcher: Matcher, seed: int, longest: int = 400) -> tuple[str, bool]:
    """A random text of a grammar, and whether the grammar is satisfied by it."""
    ids: list[int] = []
    while len(ids) < longest and not matcher.is_complete:
        token_id = draw(matcher.mask(), seed, len(ids))
        assert matcher.error is None, matcher.error
        if token_id == EOS:
            return text_of(ids), True
        ids.append(token_id)
        matcher.accept([token_id])
    return text_of(ids), matcher.is_complete


class LegalRunner(AtOnce):
    """Stands at the place of the model's runner."""

    def run(self, sequences: Sequence[SequenceInput], num_extends: int) -> list[SequenceOutput]:
        return [self._one(sequence) for sequence in sequences]

    def _one(self, sequence: SequenceInput) -> SequenceOutput:
        if sequence.sample is None:
            return SequenceOutput()
        drafts = sequence.draft_ids
        rows = [sequence.sample.after(drafts[:i]) for i in range(len(drafts) + 1)]
        sampled = [self._draw(row) for row in rows]
        return SequenceOutput(sampled[: num_accepted(drafts, sampled) + 1])

    def _draw(self, row: SampleInput) -> int:
        mask = b"\xff" * (VOCAB // 8) if row.constraint is None else row.constraint.mask()
        return draw(mask, row.params.seed, len(row.output_ids))


def scripted(submit: Submit) -> Iterable[int]:
    """What an engine that follows the grammar of a request emits: a script of `ScriptedEngine`."""
    position = 0
    if submit.grammar is None:
        while True:
            yield random.Random(f"{submit.params.seed} {position}").randrange(11, VOCAB)
            position += 1
    matcher = small_compiler().compile(submit.grammar, submit.params)
    while not matcher.is_complete:
        token_id = draw(matcher.mask(), submit.params.seed, position)
        yield token_id
        matcher.accept([token_id])
        position += 1
