"""The bodies of answers and stream chunks as msgspec structs: the fast path out.

A field that is UNSET is left out, None is written as null; clients tell the two apart. Structs are
written by msgspec alone, a few microseconds each.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType


class CachedTokens(Struct):
    cached_tokens: int


class CompletionTokens(Struct):
    """Drafts count where the engine verified any: as accepted if they stand in the answer."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """Counts under OpenAI's names and under DeepSeek's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int


def count_usage(
    *,
    prompt: int,
    completion: int,
    reasoning: int = 0,
    cached: int = 0,
    drafted: int = 0,
    accepted: int = 0,
) -> Usage:
    """Usage of a request; each prompt counts once, however many choices it has."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(cached),
        completion_tokens_details=CompletionTokens(reasoning, accepted, drafted - accepted),
        prompt_cache_hit_tokens=cached,
        prompt_cache_miss_tokens=prompt - cached,
    )


class CompletionLogprobs(Struct):
    """Four lists of one length; with echo the first token has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CalledFunction(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """The first delta of a call carries id, type and name; later ones arguments alone."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Call(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class AssistantMessage(Struct):
    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class CompletionChoice(Struct):
    """Of a whole answer or of a chunk: completions have one shape for both."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Any] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class DeltaChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Answer(Struct):
    """A whole answer, or a chunk of one; id, created and model never change within an answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


_encoder = msgspec.json.Encoder()


def encode(answer: Struct | dict[str, Any]) -> bytes:
    """The JSON of an answer."""
    return _encoder.encode(answer)


def encode_event(answer: Struct) -> bytes:
    """One server-sent event: a single line of JSON, LF only."""
    return b"data: " + _encoder.encode(answer) + b"\n\n"


def encode_named(name: str, event: dict[str, Any]) -> bytes:
    """One server-sent event with its name on a line of its own."""
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"
