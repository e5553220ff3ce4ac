"""Logprobs in the two shapes clients read, and those of the prompt.

Tokens are named by what they show alone, a part of a character by its bytes in hexadecimal, as
OpenAI's completions do; `bytes` holds the raw UTF-8. JSON has no infinity: minus infinity is
written as -9999.
"""

from collections.abc import Sequence
from typing import Any

from ..configs.logprobs import TokenLogprobs
from .answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from .tokenizer import Tokenizer

FLOOR = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """One entry a token, alternatives falling."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        tops = [
            TopLogprob(_name(tokenizer, i), max(value, FLOOR), list(tokenizer.token_bytes(i)))
            for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        text, data = _name(tokenizer, token_id), list(tokenizer.token_bytes(token_id))
        content.append(TokenLogprob(text, max(entry.logprob, FLOOR), data, tops))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """Four lists of one length; an entry of None is a token that nothing predicts."""
    tokens = [_name(tokenizer, token_id) for token_id in token_ids]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if e is None else max(e.logprob, FLOOR) for e in entries],
        top_logprobs=[
            None if e is None else _tops(tokenizer, text, e)
            for text, e in zip(tokens, entries, strict=True)
        ],
        text_offset=list(offsets),
    )


def _tops(tokenizer: Tokenizer, chosen: str, entry: TokenLogprobs) -> dict[str, float]:
    """Alternatives by their text, the likeliest of equal texts; the chosen token is among them."""
    tops: dict[str, float] = {}
    for token_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
        tops.setdefault(_name(tokenizer, token_id), max(value, FLOOR))
    tops.setdefault(chosen, max(entry.logprob, FLOOR))
    return tops


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> list[Any]:
    """Null for the first token, then every candidate by its id."""
    shown: list[Any] = [None]
    for token_id, entry in zip(prompt_ids[1:], entries, strict=True):
        found = {
            str(i): _candidate(tokenizer, i, value, rank)
            for rank, (i, value) in enumerate(
                zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
            )
        }
        found.setdefault(str(token_id), _candidate(tokenizer, token_id, entry.logprob, entry.rank))
        shown.append(found)
    return shown


def _candidate(tokenizer: Tokenizer, token_id: int, value: float, rank: int) -> dict[str, Any]:
    text = _name(tokenizer, token_id)
    return {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": text}


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """What a token shows, or `bytes:\\xf0\\x9f`: parts of characters would all look the same."""
    text = tokenizer.token_text(token_id)
    if "\ufffd" not in text:
        return text
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
