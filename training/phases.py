"""The training loop: dense, long, warm-up, sparse and drafts, each with its share of the time.

DeepSeek's order for V3.2: train with dense attention, fit the indexer to it while the model stands
still, then train both with the selection switched on. Deviation: in the sparse phase the indexer is
compared over all keys, on some queries of each row, instead of over the selected keys on all of
them; it then also learns about the keys it missed. And the model is asked, with a small weight, to
keep its attention inside the selection. Last, with everything else at rest, the MTP layer learns to
guess several tokens ahead, feeding on its own guesses, from what the model itself would say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .corpus import Mix, Source, batches
from .layers import Router
from .network import Attend, TinyDsa
from .optim import build

MTP_WEIGHT = 0.3
DRAFT_DEPTH = 3
# Weight of -log(mass): without it the early layers keep a thin attention over everything, which no
# selection of top-k keys can hold.
FOCUS_WEIGHT = 0.2
WARMUP_STEPS = 60
FINAL_LR = 0.03
BIAS_RATE = 0.01


@dataclass(frozen=True)
class Phase:
    """One phase: how queries attend, what is read and what learns.

    The compiled phases have rows of one length, the context, so that each way to attend is compiled
    once; the documents grow instead. depth: how far the MTP layer guesses; above 1 it alone learns.
    """

    name: str
    attend: Attend
    length: int
    mix: Mix
    learn_model: bool = True
    learn_indexer: bool = False
    token_share: float = 1.0
    depth: int = 1


def plan(context: int, extra: float) -> dict[str, Phase]:
    """The phases by name, for a context of so many tokens."""
    narrow = Mix(extra=extra, low=60, high=context // 4 - 100)
    brief = Mix(recall=0.08, extra=extra, low=40, high=context // 16 - 60)
    wide = Mix(recall=0.16, repetition=0.04, talk=0.62, extra=extra, low=60, high=context - 300)
    return {
        "dense": Phase("dense", "dense", context, narrow),
        "long": Phase("long", "dense", context, wide),
        "warmup": Phase("warmup", "dense", context, wide, False, True, 0.5),
        "sparse": Phase("sparse", "sparse", context, wide, True, True, 0.5),
        "drafts": Phase("drafts", "dense", context // 16, brief, False, True, depth=DRAFT_DEPTH),
    }


@dataclass
class Run:
    """What a training needs besides the model, and what it has done so far."""

    tokenizer_file: str
    seed: int
    workers: int
    batch_tokens: int
    lr: float
    index_lr: float
    minutes: float
    extra_text: tuple[str, ...] = ()
    compiled: bool = False
    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    log: list[dict[str, float | str]] = field(default_factory=list)

    @property
    def progress(self) -> float:
        """The share of the training time that is over."""
        return min((time.monotonic() - self.started) / (60 * self.minutes), 1.0)


def weighted_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy under the loss weights."""
    logits = F.linear(hidden, head).float().flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1.0)


def draft_loss(guess: Tensor, hidden: Tensor, head: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy between what the model says of a token and what was guessed.

    Of assistant text alone: nothing else is ever drafted.
    """
    mine = weights == 1.0
    with torch.no_grad():
        said = F.linear(hidden[mine], head).float().softmax(-1)
    guessed = F.linear(guess[mine], head).float().log_softmax(-1)
    return -(said * guessed).sum(-1).mean()


def pick_queries(weights: Tensor, count: int) -> Tensor:
    """Positions at which the indexer is compared: answers much more often than context."""
    return torch.multinomial(weights + 0.2, min(count, weights.shape[1]), replacement=False)


class Trainer:
    """Steps of one model under one set of optimizers."""

    def __init__(self, model: TinyDsa, run: Run):
        self.model, self.run = model, run
        self.optimizers = build(model, run.lr, run.index_lr)
        self.device = next(model.parameters()).device
        self.loss = weighted_loss
        self.steps = 0
        if run.compiled:
            self.loss = torch.compile(weighted_loss)
            # Two kinds of layers, three ways to attend, a few lengths.
            torch._dynamo.config.recompile_limit = 64  # pyright: ignore[reportAttributeAccessIssue]
            for block in model.model.layers:
                block.compile(dynamic=False)

    def losses(self, phase: Phase, tokens: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """The named losses of one batch; `total` is what is learned from."""
        length = phase.length
        # About 2048 queries a batch are plenty: the indexer has few parameters.
        count = max(2048 // len(tokens), 64)
        probe = pick_queries(weights[:, 1 : length + 1], count) if phase.learn_indexer else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            out = self.model(
                tokens[:, :length], tokens[:, 1:-1], phase.attend, probe, depth=phase.depth
            )
            found: dict[str, Tensor] = {}
            total = torch.zeros((), device=self.device)
            head = self.model.lm_head.weight
            if phase.learn_model:
                found["lm"] = self.loss(out.hidden, head, tokens[:, 1:-1], weights[:, 1:-1])
                found["mtp"] = self.loss(out.drafts[0], head, tokens[:, 2:], weights[:, 2:])
                total = found["lm"] + MTP_WEIGHT * found["mtp"]
            for number, draft in enumerate(out.drafts, 1):
                if phase.depth > 1:
                    arguments = (draft[:, :-1], out.hidden[:, 1:], head, weights[:, 2:-1])
                    found[f"draft{number}"] = draft_loss(*arguments)
                    total = total + found[f"draft{number}"]
            if probe is not None:
                found["kl"] = torch.stack([kl for kl, _ in out.reports]).sum()
                mass = torch.stack([mass for _, mass in out.reports])
                found["mass"] = mass.mean()
                total = total + found["kl"]
                if phase.learn_model or phase.depth > 1:
                    total = total - FOCUS_WEIGHT * mass.clamp_min(1e-4).log().mean()
        return {**found, "total": total}

    def step(self, phase: Phase, tokens: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """One update."""
        found = self.losses(phase, tokens.to(self.device), weights.to(self.device))
        found["total"].backward()
        scale = min((self.steps + 1) / WARMUP_STEPS, 1.0)
        scale *= FINAL_LR + (1 - FINAL_LR) * (1 - self.run.progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scale
        rest = self.optimizers[1].param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_([p for p in rest if p.grad is not None], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if phase.learn_model:
            self.balance(BIAS_RATE * scale)
        self.steps += 1
        self.run.tokens += tokens.numel()
        return found

    def balance(self, rate: float) -> None:
        """Move every router's bias."""
        for module in self.model.modules():
            if isinstance(module, Router):
                module.balance(rate)

    def freeze(self, phase: Phase) -> None:
        """Let only the phase's parameters learn."""
        for name, param in self.model.named_parameters():
            indexer = "indexer" in name
            learns = phase.learn_indexer if indexer else phase.learn_model
            if phase.depth > 1:
                learns = name.startswith(f"model.layers.{len(self.model.model.layers) - 1}.")
            param.requires_grad_(learns)

    def run_phase(self, phase: Phase, until: float, max_steps: int) -> None:
        """Train until `progress` reaches `until` or the steps are done."""
        self.freeze(phase)
        rows = max(int(self.run.batch_tokens * phase.token_share) // phase.length, 1)
        source = Source(
            self.run.tokenizer_file,
            phase.mix,
            rows,
            phase.length,
            self.run.seed + self.steps,
            extra_text=self.run.extra_text,
        )
        stream = batches(source, self.run.workers)
        self.model.train()
        # Warm-up and drafts are over before their compilation would have paid.
        stance = "default" if phase.learn_model else "force_eager"
        with torch.compiler.set_stance(stance):
            for number, found in enumerate(self.updates(phase, stream, until), 1):
                if number % 25 == 0 or number in (1, max_steps):
                    self.note(phase, number, found)
                if number == max_steps:
                    break

    def updates(
        self, phase: Phase, stream: Iterator[tuple[Tensor, Tensor]], until: float
    ) -> Iterator[dict[str, Tensor]]:
        """The losses of step after step while there is time."""
        while self.run.progress < until:
            tokens, weights = next(stream)
            yield self.step(phase, tokens, weights)

    def note(self, phase: Phase, number: int, found: dict[str, Tensor]) -> None:
        """Print and keep one line of figures; reading them waits for the device."""
        figures = {name: round(float(value.detach()), 4) for name, value in found.items()}
        seconds = round(time.monotonic() - self.run.started, 1)
        line = {"phase": phase.name, "step": number, "seconds": seconds, "tokens": self.run.tokens}
        self.run.log.append({**line, **figures})
        print(" ".join(f"{key}={value}" for key, value in self.run.log[-1].items()), flush=True)
