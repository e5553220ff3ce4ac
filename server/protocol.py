"""The bodies of requests as types: fields that chat and completions share, and completions' own.

Ranges that need no knowledge of the model are checked here; what depends on the vocabulary or the
context comes later, in `sampling.py` and the modules of the two routes.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from .structured_fields import AnswerFormat, NonEmpty, StructuredOutputs
from .validation import RequestModel, Strict, wrong

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SALT_CHARACTERS = 256
MAX_PRIORITY = 100
MAX_DEADLINE = 86_400.0
MAX_BIASES = 1024
_INT64 = 2**63

NonNegative = Annotated[int, Field(ge=0, lt=_INT64)]
Int64 = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Salt = Annotated[str | None, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("must be a string or a list of strings")
    if "" in stops:
        raise wrong("an empty stop string would end every answer")
    if len(stops) > MAX_STOPS:
        raise wrong(f"at most {MAX_STOPS} stop strings are taken, not {len(stops)}")
    total = sum(map(len, stops))
    if total > MAX_STOP_CHARACTERS:
        raise wrong(f"at most {MAX_STOP_CHARACTERS} characters are taken together, not {total}")
    return stops


def _biases(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise wrong("must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise wrong(f"at most {MAX_BIASES} entries are taken, not {len(value)}")
    for key, bias in value.items():
        name = ascii(key[:32])
        if not (key.isascii() and key.isdecimal() and str(int(key[:19])) == key):
            raise wrong(f"the key {name} is not a token id in decimal digits")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wrong(f"the value of key {name} must be a number from -100 to 100")
    return value


def _prompts(value: Any) -> list[Any]:
    """Every form of a prompt as a list of prompts, each a string or a list of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value]
        if kinds == {str}:
            return value
        if kinds == {list} and all(ids and set(map(type, ids)) == {int} for ids in value):
            return value
    if isinstance(value, list) and (not value or [] in value):
        raise wrong("an empty list holds no tokens")
    raise wrong("must be a string, a list of token ids, or a list of strings or of lists of ids")


_TEXTS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _TEXTS | {"minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
Stops = Annotated[
    list[str],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS | {"maxItems": MAX_STOPS}]}),
]
Biases = Annotated[dict[str, float], BeforeValidator(_biases)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


class StreamOptions(Strict):
    """What a stream carries beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(RequestModel):
    """Fields of both generating routes."""

    model: str = ""
    max_tokens: NonNegative | None = None
    max_completion_tokens: NonNegative | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int | None, Field(ge=1, lt=_INT64)] = None
    seed: Int64 | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=_INT64)] = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float | None, Field(ge=1e-6, le=1e6)] = None
    logit_bias: Biases = Field(default_factory=dict)
    min_tokens: NonNegative = 0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(max_length=128)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    deadline_seconds: Annotated[float | None, Field(gt=0, le=MAX_DEADLINE)] = None
    cache_salt: Salt = None
    cache_prompt: bool = True
    attention: Literal["dense", "sparse"] | None = None
    index_topk: Annotated[int | None, Field(ge=1, lt=_INT64)] = None
    response_format: AnswerFormat = None
    structured_outputs: StructuredOutputs | None = None
    regex: NonEmpty | None = None
    ebnf: NonEmpty | None = None


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts
    suffix: str = ""
    echo: bool = False
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True
