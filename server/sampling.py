"""From the fields of a request to what the sampler gets, one set of parameters for each choice."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configs.engine_info import EngineInfo
from ..configs.sampling import AttentionRule, SamplingParams, mix64
from .errors import ApiError, invalid_value, output_too_long, unsupported
from .protocol import GenerationRequest
from .tokenizer_files import read_json
from .validation import validate

GREEDY_BELOW = 1e-5
_DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """What applies where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_defaults(directory: Path) -> tuple[SamplingDefaults, str | None]:
    """Defaults of a checkpoint's generation_config.json, and a sentence where it changes any.

    Raises ValueError for values the sampler cannot take.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults(), None
    found = read_json(path)
    given = {name: found[name] for name in _DEFAULT_FIELDS if found.get(name) is not None}
    try:
        validate(GenerationRequest, given)
    except ApiError as error:
        raise ValueError(f"generation_config.json: {error.message}") from None
    defaults = SamplingDefaults(**given)
    if defaults == SamplingDefaults():
        return defaults, None
    values = ", ".join(f"{name} {value}" for name, value in given.items())
    return defaults, f"generation_config.json sets the sampling defaults: {values}"


def child_seed(seed: int, child: int) -> int:
    """The seed of choice `child`: the request's own for choice 0, a mix of both for the others.

    SplitMix64 (Steele, Lea and Flood, 2014) of `seed` advanced by `child` increments, as a signed
    64-bit integer. So the set of choices is reproducible and its members differ.
    """
    if child == 0:
        return seed
    z = mix64(seed + child * 0x9E3779B97F4A7C15)
    return z - (1 << 64) if z >> 63 else z


class SeedSource:
    """Seeds for requests that name none; the server's `--seed` makes them repeat."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> int:
        return self._random.getrandbits(63)


def check_sampling(request: GenerationRequest, info: EngineInfo, longest: int) -> None:
    """Raise ApiError for values that are wrong together, or outside vocabulary or context."""
    vocab_size = info.vocab_size
    asked = asked_tokens(request)
    if asked is not None and asked > longest:
        raise output_too_long(limit_field(request), longest, asked)
    if request.best_of is not None and request.best_of != request.n:
        raise unsupported("best_of", f"best_of must equal n ({request.n}) where it is given")
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "stream_options needs stream to be true")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid_value("prompt_logprobs", "prompt_logprobs cannot be streamed")
    for key in request.logit_bias:
        if int(key) >= vocab_size:
            raise invalid_value(
                "logit_bias", f"the key '{key}' is outside the vocabulary of {vocab_size} ids"
            )
    for token_id in request.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid_value(
                "stop_token_ids", f"{token_id} is outside the vocabulary of {vocab_size} ids"
            )

    _check_attention(request, info.index_topk)


def _check_attention(request: GenerationRequest, model_topk: int | None) -> None:
    given = {"attention": request.attention, "index_topk": request.index_topk}
    for name, value in given.items():
        if value is not None and model_topk is None:
            raise unsupported(name, f"{name} needs a model with an indexer; this one has none")
    topk = request.index_topk
    if topk is not None and model_topk is not None and topk > model_topk:
        raise invalid_value("index_topk", f"index_topk must be from 1 to {model_topk}, the model's")
    if topk is not None and request.attention == "dense":
        raise invalid_value("index_topk", "index_topk does not go together with dense attention")


def attention_rule(request: GenerationRequest) -> AttentionRule | None:
    """What the request's tokens attend to; None: as the model was made."""
    if request.attention is None and request.index_topk is None:
        return None
    return AttentionRule(request.attention or "auto", request.index_topk)


def asked_tokens(request: GenerationRequest) -> int | None:
    """The output limit a request names; the newer of the two fields wins."""
    newer = request.max_completion_tokens
    return request.max_tokens if newer is None else newer


def limit_field(request: GenerationRequest) -> str:
    """The name of the field that `asked_tokens` reads."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


@dataclass(frozen=True)
class OutputShape:
    """What of the answer the request's route decides: its length and its logprobs."""

    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None


def resolve(
    request: GenerationRequest,
    shape: OutputShape,
    defaults: SamplingDefaults,
    seed: int,
    info: EngineInfo,
) -> SamplingParams:
    """The parameters of choice 0; the other choices differ in their seed alone."""

    def pick(value: Any, default: Any) -> Any:
        return default if value is None else value

    temperature = pick(request.temperature, defaults.temperature)
    top_k = pick(request.top_k, defaults.top_k)
    bias: Mapping[str, float] = request.logit_bias
    ends = [] if request.ignore_eos else info.eos_token_ids
    return SamplingParams(
        max_tokens=shape.max_tokens,
        seed=seed,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=top_k if 0 < top_k < info.vocab_size else 0,
        top_p=pick(request.top_p, defaults.top_p),
        min_p=pick(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=pick(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias={int(key): float(value) for key, value in bias.items()},
        min_tokens=request.min_tokens,
        stop_token_ids=list(dict.fromkeys([*ends, *request.stop_token_ids])),
        logprobs=shape.logprobs,
        prompt_logprobs=shape.prompt_logprobs,
        attention=attention_rule(request),
    )
