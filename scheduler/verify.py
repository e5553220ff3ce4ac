"""A checkpoint's answers beside those of transformers, an implementation that is none of ours.

The model writes the texts itself, so they are of the kind it was made for; then both sides score
every token of them, given the same tokens before it. One number a measure, a bound for most of
them, and a verdict.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configs.engine import EngineConfig
from ..configs.logprobs import TokenLogprobs
from ..configs.sampling import SamplingParams
from ..configs.setting_error import SettingError
from ..model.loading import DTYPES
from .offline import OfflineEngine

NUM_TOP = 20
# Mean distance of logprobs that rounding alone explains, by the format of the computation.
MEAN_DISTANCES = (("float32", 1e-3), ("bfloat16", 5e-2), ("float16", 1e-2))
LEAST_AGREEMENT = 0.99
LEAST_OVERLAP = 0.95


@dataclass(frozen=True)
class Texts:
    """What is compared: so many sequences of so many tokens, each begun by `first_id`."""

    num_sequences: int
    num_tokens: int
    first_id: int


@dataclass(frozen=True)
class Measure:
    """One line of the report; fails where it is not within its bound. A bound of None: for show."""

    name: str
    value: float
    bound: float | None = None
    is_floor: bool = False

    @property
    def is_met(self) -> bool:
        if self.bound is None:
            return True
        # Written so that NaN meets no bound.
        return self.value >= self.bound if self.is_floor else self.value <= self.bound

    def __str__(self) -> str:
        if self.bound is None:
            return f"{self.name:26}{self.value:>12.3g}"
        sign = ">=" if self.is_floor else "<="
        verdict = "ok" if self.is_met else "FAILED"
        return f"{self.name:26}{self.value:>12.3g}   {sign} {self.bound:<8.3g} {verdict}"


def verify(
    config: EngineConfig, texts: Texts, tolerance: float | None, say: Callable[[str], None]
) -> bool:
    """Compare, and say a line for each measure; True if all bounds are met.

    tolerance: of the mean distance; by the format of the computation if not given. Raises
    ValueError for a checkpoint that either side cannot load, ImportError without transformers.
    """
    if config.load_format == "dummy":
        raise SettingError("engine.load_format is dummy: random weights agree with no checkpoint")
    import transformers  # noqa: PLC0415 - an extra, and heavy: only this command needs it

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ids, ours, engine = _ours(config, texts)
    info = engine.info
    bound = dict(MEAN_DISTANCES)[info.dtype] if tolerance is None else tolerance
    # Before the other copy of the weights is loaded.
    del engine
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        Path(config.model), dtype=DTYPES[info.dtype]
    )
    theirs = _theirs(model.eval().to(info.device), ids)
    say(
        f"{len(ids)} sequences of {texts.num_tokens} tokens in {info.dtype} on {info.device}, "
        f"attention by {info.attention_backend}, against transformers {transformers.__version__}"
    )
    found = measures(ids, ours, theirs, bound)
    for measure in found:
        say(str(measure))
    return all(measure.is_met for measure in found)


def _ours(
    config: EngineConfig, texts: Texts
) -> tuple[list[list[int]], list[list[TokenLogprobs]], OfflineEngine]:
    """Sequences the model writes at temperature 1, and its scores of all their tokens."""
    engine = OfflineEngine.load(config.model, config=config)
    longest = min(engine.info.max_model_len, engine.info.num_cache_tokens)
    if texts.num_tokens > longest:
        raise SettingError(f"--tokens is {texts.num_tokens}; a request has at most {longest}")
    params = [
        SamplingParams(max_tokens=texts.num_tokens - 1, seed=seed)
        for seed in range(texts.num_sequences)
    ]
    written = engine.generate([[texts.first_id]] * len(params), params, ignore_eos=True)
    ids = [[texts.first_id, *answer.token_ids] for answer in written]
    scoring = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=NUM_TOP)
    return ids, [answer.prompt_logprobs for answer in engine.generate(ids, scoring)], engine


@torch.inference_mode()
def _theirs(model: Any, ids: Sequence[Sequence[int]]) -> Iterable[Tensor]:
    """Logprobs [T - 1, V] of what follows each token but the last, a sequence at a time."""
    for sequence in ids:
        logits_TV = model(torch.tensor([sequence], device=model.device)).logits[0, :-1]
        yield logits_TV.float().log_softmax(dim=-1).cpu()


def measures(
    ids: Sequence[Sequence[int]],
    ours: Sequence[Sequence[TokenLogprobs]],
    theirs: Iterable[Tensor],
    mean_bound: float,
) -> list[Measure]:
    """How far our scores of each sequence's tokens but the first are from the logprobs [T-1, V].

    A likeliest token of ours that is as likely there as theirs, within `mean_bound`, agrees.
    """
    distances: list[float] = []
    agreed: list[bool] = []
    overlaps: list[float] = []
    for sequence, scores, logprobs_TV in zip(ids, ours, theirs, strict=True):
        for token, score, logprobs_V in zip(sequence[1:], scores, logprobs_TV, strict=True):
            distances.append(abs(score.logprob - logprobs_V[token].item()))
            best, tops = logprobs_V.max().item(), score.top_ids
            agreed.append(best - logprobs_V[tops[0]].item() <= mean_bound)
            overlaps.append(len(set(tops) & set(logprobs_V.topk(len(tops)).indices.tolist())))
            overlaps[-1] /= len(tops)
    count = len(distances)
    return [
        Measure("mean logprob distance", sum(distances) / count, mean_bound),
        Measure("greatest logprob distance", max(distances)),
        Measure("greedy agreement", sum(agreed) / count, LEAST_AGREEMENT, is_floor=True),
        Measure(f"top-{NUM_TOP} overlap", sum(overlaps) / count, LEAST_OVERLAP, is_floor=True),
    ]
