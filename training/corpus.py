"""Endless training rows: documents drawn by weight, encoded, packed, made in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from . import talk, tasks
from .chat_format import Chat, Piece, Turn, pieces
from .recall import log_length, recall, repetition
from .slots import Slots
from .tool_chats import tool_chat

LICENCES = ("public-domain", "cc0-1.0", "mit", "apache-2.0", "bsd-3-clause")


class DataError(RuntimeError):
    """The data asked for cannot be used; the message says what to do."""


EXCHANGES: tuple[tuple[Callable[[Slots], talk.Exchange], int], ...] = (
    (talk.story, 18),
    (talk.reading, 12),
    (talk.capital, 6),
    (talk.opposite, 4),
    (talk.word_form, 5),
    (talk.meaning, 4),
    (talk.fact, 6),
    (talk.greeting, 4),
    (talk.unknown, 2),
    (talk.following, 3),
    (talk.told_earlier, 9),
    (tasks.arithmetic, 10),
    (tasks.listing, 9),
    (tasks.copying, 12),
    (tasks.tracking, 8),
    (tasks.json_object, 9),
)


@dataclass(frozen=True)
class Mix:
    """Relative number of documents of each kind, and the lengths of recall documents in tokens."""

    talk: float = 0.5
    recall: float = 0.3
    repetition: float = 0.08
    plain: float = 0.06
    thought: float = 0.03
    tools: float = 0.05
    extra: float = 0.0
    low: int = 60
    high: int = 900


@dataclass(frozen=True)
class Source:
    """Everything a worker needs to make rows."""

    tokenizer_file: str
    mix: Mix
    rows: int
    length: int
    seed: int
    held_out: bool = False
    extra_text: tuple[str, ...] = ()


def conversation(slots: Slots) -> Chat:
    """One to four exchanges of any kind, sometimes under a system prompt."""
    makers, weights = zip(*EXCHANGES, strict=True)
    turns = []
    for make in slots.rng.choices(makers, weights, k=slots.rng.choice((1, 1, 2, 3, 4))):
        turns += make(slots)
    if slots.chance(0.2):
        turns = [Turn("system", slots.one_of(*tasks.SYSTEMS)), *turns]
    if slots.chance(0.94):
        return Chat(turns)
    reasoning = slots.one_of("I can answer this directly.", "This is simple.", "Let me answer.")
    turns[-1] = replace(turns[-1], reasoning=reasoning)
    return Chat(turns, thinking=True)


def extra_paragraph(slots: Slots, texts: tuple[str, ...]) -> Chat:
    """A stretch of the text given by `--extra-text`."""
    text = slots.rng.choice(texts)
    start = slots.rng.randrange(max(len(text) - 2000, 1))
    return Chat([Turn("text", slots.record(text[start : start + 2000]))])


def document(slots: Slots, source: Source) -> Chat:
    """One document of the mix."""
    mix = source.mix
    kinds: dict[str, Callable[[], Chat]] = {
        "talk": lambda: conversation(slots),
        "recall": lambda: recall(slots, log_length(slots, mix.low, mix.high)),
        "repetition": lambda: repetition(slots, mix.high),
        "plain": lambda: talk.plain_text(slots),
        "thought": lambda: tasks.thought(slots),
        "tools": lambda: tool_chat(slots),
        "extra": lambda: extra_paragraph(slots, source.extra_text),
    }
    weights = [float(vars(mix)[kind]) for kind in kinds]
    return slots.rng.choices(list(kinds.values()), weights)[0]()


def documents(source: Source, stream: int) -> Iterator[Chat]:
    """The documents of one worker that lie on the wanted side of the split."""
    number = 0
    while True:
        slots = Slots(f"{source.seed}/{stream}/{number}")
        chat = document(slots, source)
        if slots.held_out == source.held_out:
            yield chat
        number += 1


Encoded = tuple[list[int], list[float]]


def encode(tokenizer: Tokenizer, parts: list[list[Piece]]) -> list[Encoded]:
    """Ids and loss weights of documents given as pieces; one call, which is much the fastest."""
    flat = [text for document_parts in parts for text, _ in document_parts]
    encoded = iter(tokenizer.encode_batch(flat, add_special_tokens=False))
    out = []
    for document_parts in parts:
        ids: list[int] = []
        weights: list[float] = []
        for _, weight in document_parts:
            piece = next(encoded).ids
            ids += piece
            weights += [weight] * len(piece)
        out.append((ids, weights))
    return out


def encoded_documents(source: Source, stream: int, batch: int = 64) -> Iterator[Encoded]:
    """`documents`, encoded."""
    tokenizer = Tokenizer.from_file(source.tokenizer_file)
    chats = documents(source, stream)
    while True:
        yield from encode(tokenizer, [pieces(next(chats)) for _ in range(batch)])


def packed_rows(source: Source, stream: int) -> Iterator[Encoded]:
    """Rows of `length` + 2 tokens. A document that does not fit waits for the next row."""
    stock = encoded_documents(source, stream)
    size = source.length + 2
    waiting: list[Encoded] = []
    while True:
        ids: list[int] = []
        weights: list[float] = []
        tries = 0
        while len(ids) < size:
            doc = waiting.pop() if waiting and not ids else next(stock)
            tries += 1
            too_long = len(doc[0]) > size - len(ids)
            if too_long and ids and tries < 12 and len(waiting) < 64:
                waiting.insert(0, doc)
                continue
            ids += doc[0]
            weights += doc[1]
        yield ids[:size], weights[:size]


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches (tokens [B, T + 2], weights [B, T + 2])."""

    def __init__(self, source: Source):
        self.source = source

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        rows = packed_rows(self.source, info.id if info else 0)
        while True:
            batch = [next(rows) for _ in range(self.source.rows)]
            yield torch.tensor([ids for ids, _ in batch]), torch.tensor([w for _, w in batch])


def batches(source: Source, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless stream; the order of batches depends on the number of workers only."""
    ahead = 8 if workers else None
    return iter(DataLoader(Rows(source), None, num_workers=workers, prefetch_factor=ahead))


def held_out_batch(source: Source, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """One batch from the other side of the split."""
    asked = replace(source, rows=rows, seed=seed, held_out=True)
    return next(iter(Rows(asked)))


def read_extra_text(folder: Path, licence: str) -> tuple[str, ...]:
    """The plain-text files of a folder, if their licence lets the weights be given away."""
    if licence not in LICENCES:
        allowed = ", ".join(LICENCES)
        raise DataError(f"--extra-licence {licence!r} is not allowed; use one of {allowed}")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise DataError(f"--extra-text {folder}: no .txt file there; give a folder that holds some")
    return tuple(file.read_text(encoding="utf-8") for file in files)
