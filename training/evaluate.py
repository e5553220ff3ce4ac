"""The figures that say whether a checkpoint is worth shipping, and their limits.

Everything is measured on the held-out side of the data, on exported weights in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .chat_format import EOS, USER, Chat, Turn, pieces, prompt
from .corpus import Encoded, Mix, Source, encode, held_out_batch
from .network import Attend, TinyDsa
from .recall import recall
from .slots import Slots

Figures = dict[str, float]


CHAT = Mix(recall=0.0, repetition=0.0, plain=0.0, tools=0.0, thought=0.0)


@dataclass(frozen=True)
class Bench:
    """A model with its tokenizer, and how much of everything to measure."""

    model: TinyDsa
    tokenizer: Tokenizer
    tokenizer_file: str
    rows: int = 16
    needle_chats: int = 40
    seed: int = 9001

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def held_out(self, length: int, mix: Mix) -> tuple[Tensor, Tensor]:
        """`rows` held-out rows of `length` + 2 tokens."""
        source = Source(self.tokenizer_file, mix, self.rows, length, self.seed)
        tokens, weights = held_out_batch(source, self.rows, self.seed)
        return tokens.to(self.device), weights.to(self.device)


def by_row(tokens: Tensor, weights: Tensor):
    """Row by row, [1, T + 2] each: a row of 4096 tokens is work enough for any device."""
    return zip(tokens.split(1), weights.split(1), strict=True)


@torch.no_grad()
def losses(bench: Bench, length: int, attend: Attend) -> Figures:
    """Cross-entropy a token: of all tokens, and of those that the assistant writes."""
    total = answers = count = answer_count = 0.0
    for tokens, weights in by_row(*bench.held_out(length, Mix(low=60, high=length - 100))):
        logits = bench.model.lm_head(bench.model(tokens[:, :-2], attend=attend).hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten(), reduction="none")
        mine = weights[:, 1:-1].flatten() == 1.0
        total, count = total + float(loss.sum()), count + loss.numel()
        answers, answer_count = answers + float(loss[mine].sum()), answer_count + int(mine.sum())
    return {"all": total / count, "answers": answers / answer_count}


def needle_chats(bench: Bench, tokens: int, style: str) -> list[Encoded]:
    """Held-out recall chats of about `tokens` tokens with up to four questions each."""
    found: list[Encoded] = []
    number, limit = 0, bench.model.config.max_position_embeddings
    while len(found) < bench.needle_chats:
        slots = Slots(f"needle/{bench.seed}/{tokens}/{style}/{number}")
        number += 1
        chat = recall(slots, tokens, style, questions=4)
        if slots.held_out:
            [encoded] = encode(bench.tokenizer, [pieces(chat)])
            if len(encoded[0]) <= limit:
                found.append(encoded)
            else:
                # `recall` plans with an average; a poorer tokenizer needs a lower target.
                tokens = int(tokens * 0.97)
    return found


def answer_spans(weights: Tensor) -> list[tuple[int, int]]:
    """The stretches [start, end) that the assistant writes, without the first acknowledgement."""
    mine = F.pad((weights == 1.0).int(), (1, 1)).diff()
    starts, ends = (mine == 1).nonzero().flatten(), (mine == -1).nonzero().flatten()
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


@torch.no_grad()
def needle(bench: Bench, tokens: int, style: str, attend: Attend) -> Figures:
    """Share of answers whose every token is the model's first choice: what greedy text would be."""
    right = asked = length = 0
    for ids, weights in needle_chats(bench, tokens, style):
        row = torch.tensor([ids], device=bench.device)
        hidden = bench.model(row, attend=attend).hidden
        hits = bench.model.lm_head(hidden)[0, :-1].argmax(-1) == row[0, 1:]
        for start, end in answer_spans(torch.tensor(weights)):
            # "I will remember that." needs no memory; every real answer is asked by a "?".
            if "?" in bench.tokenizer.decode(ids[max(start - 12, 0) : start]):
                right += bool(hits[start - 1 : end - 1].all())
                asked += 1
        length += len(ids)
    return {"recall": right / asked, "asked": asked, "mean_tokens": length / bench.needle_chats}


def needle_distances(bench: Bench, tokens: int) -> list[int]:
    """How many tokens lie between a fact and the question that asks for it, for every question."""
    found = []
    for ids, weights in needle_chats(bench, tokens, "prose"):
        for start, end in answer_spans(torch.tensor(weights)):
            said = bench.tokenizer.decode(ids[start:end])
            before = bench.tokenizer.decode(ids[:start])
            if said in before:
                tail = before[before.index(said) + len(said) :]
                # The first question may share its turn with the facts, after an empty line.
                question = max(tail.rfind(USER), tail.rfind("\n\n"))
                between = bench.tokenizer.encode(tail[:question], add_special_tokens=False)
                found.append(len(between.ids))
    return found


@torch.no_grad()
def exact_answers(bench: Bench, make: Callable[[Slots], list[Turn]], count: int) -> float:
    """Share of held-out exchanges whose last answer is right to the last token."""
    right = asked = number = 0
    while asked < count:
        slots = Slots(f"task/{bench.seed}/{make.__name__}/{number}")
        number += 1
        turns = make(slots)
        # Closed lists of facts have no unseen values; there the answer is all that can be asked.
        if not slots.held_out and len(slots.drawn) > 1:
            continue
        [(ids, weights)] = encode(bench.tokenizer, [pieces(Chat(turns))])
        row = torch.tensor([ids], device=bench.device)
        hidden = bench.model(row, attend="sparse").hidden
        hits = bench.model.lm_head(hidden)[0, :-1].argmax(-1) == row[0, 1:]
        start, end = answer_spans(torch.tensor(weights))[-1]
        right += bool(hits[start - 1 : end - 1].all())
        asked += 1
    return right / asked


@torch.no_grad()
def attention_mass(bench: Bench, length: int) -> list[float]:
    """Attention inside the indexer's top-k, one figure a layer, beyond twice top-k tokens."""
    reach = 2 * bench.model.config.index_topk
    totals: list[Tensor] = []
    generator = torch.Generator().manual_seed(bench.seed)
    for tokens, _ in by_row(*bench.held_out(length, Mix(low=60, high=length - 100))):
        probe = torch.randint(reach, length, (1, 256), generator=generator).to(bench.device)
        out = bench.model(tokens[:, :-2], tokens[:, 1:-1], "sparse", probe)
        totals.append(torch.stack([mass.mean() for _, mass in out.reports]))
    return torch.stack(totals).mean(0).tolist()


@torch.no_grad()
def draft_agreement(
    bench: Bench, length: int, mix: Mix, attend: Attend, depth: int = 1
) -> list[float]:
    """How often the MTP layer's guesses are what the model says next, in assistant text.

    One figure for each depth: the second guess feeds on the first, and so on, if those were right.
    """
    agreed, count = [0] * depth, 0
    for tokens, weights in by_row(*bench.held_out(length, mix)):
        out = bench.model(tokens[:, :-2], tokens[:, 1:-1], attend, depth=depth)
        model = bench.model.lm_head(out.hidden).argmax(-1)[:, 1:]
        mine = weights[:, 2:-1] == 1.0
        for number, hidden in enumerate(out.drafts):
            draft = bench.model.lm_head(hidden).argmax(-1)[:, :-1]
            agreed[number] += int((model == draft)[mine].sum())
        count += int(mine.sum())
    return [hits / count for hits in agreed]


@torch.no_grad()
def answer(bench: Bench, question: str, limit: int = 120, thinking: bool = False) -> str:
    """The model's greedy answer to one user message."""
    ids = bench.tokenizer.encode(prompt(question, thinking=thinking), add_special_tokens=False).ids
    end, start = bench.tokenizer.token_to_id(EOS), len(ids)
    while len(ids) < start + limit:
        row = torch.tensor([ids], device=bench.device)
        hidden = bench.model(row, attend="sparse").hidden[0, -1]
        ids.append(int(bench.model.lm_head(hidden).argmax()))
        if ids[-1] == end:
            return bench.tokenizer.decode(ids[start:-1], skip_special_tokens=False)
    return bench.tokenizer.decode(ids[start:], skip_special_tokens=False)


@dataclass(frozen=True)
class Gate:
    """A limit that a figure must reach (or stay under, if `at_most`)."""

    name: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def passed(self) -> bool:
        """Whether the figure is on the right side."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "ok  " if self.passed else "FAIL"
        return f"{verdict} {self.name}: {self.value:.4f} ({sign} {self.limit})"


def measure(bench: Bench, note: Callable[[str], None] = print) -> dict[str, object]:
    """All figures; `note` is told about each as soon as it is known."""
    context = bench.model.config.max_position_embeddings
    short, long = context // 4, int(context * 0.95)
    found: dict[str, object] = {}

    def keep(name: str, value: object) -> None:
        found[name] = value
        note(f"{name}: {value}")

    for attend in ("dense", "sparse", "random", "window"):
        keep(f"loss_{attend}", losses(bench, context, attend))
        for tokens in (short, long):
            keep(f"needle_{tokens}_{attend}", needle(bench, tokens, "prose", attend))
    for style in ("brief", "table"):
        keep(f"needle_{short}_{style}", needle(bench, short, style, "sparse"))
    keep("attention_mass", attention_mass(bench, context))
    keep("draft_agreement_chat", draft_agreement(bench, short, CHAT, "sparse", 4))
    keep("draft_agreement_all", draft_agreement(bench, context, Mix(), "sparse", 4))
    return found


def gates(figures: dict, context: int) -> list[Gate]:
    """The limits of the figures of `measure`."""
    short, long = context // 4, int(context * 0.95)
    gap = figures["loss_sparse"]["answers"] - figures["loss_dense"]["answers"]
    gap_all = figures["loss_sparse"]["all"] - figures["loss_dense"]["all"]

    def ratio(difference: float) -> float:
        return float(torch.tensor(difference).exp())

    mass = figures["attention_mass"]
    checks = [
        Gate("perplexity of answers, DSA over dense", ratio(gap), 1.02, at_most=True),
        Gate("perplexity of all text, DSA over dense", ratio(gap_all), 1.02, at_most=True),
        Gate(f"needle recall at {short}", figures[f"needle_{short}_sparse"]["recall"], 0.95),
        Gate(f"needle recall at {long}", figures[f"needle_{long}_sparse"]["recall"], 0.80),
        Gate("attention mass, mean over layers", sum(mass) / len(mass), 0.85),
        Gate("MTP agreement on chat", figures["draft_agreement_chat"][0], 0.70),
    ]
    for control in ("random", "window"):
        value = figures[f"needle_{long}_{control}"]["recall"]
        checks.append(Gate(f"needle recall at {long}, {control} keys", value, 0.10, at_most=True))
    return checks
