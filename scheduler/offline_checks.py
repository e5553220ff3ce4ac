"""What the engine without a server checks of a script's prompts and parameters.

Behind the server every field was validated by the API process; here a script's own values come,
and one that is wrong would fail deep inside of a step. Ranges are those of the API. Every refusal
is one line that names the prompt by its place, the field and the value.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..configs.sampling import AttentionRule, SamplingParams

_INT64 = 1 << 63
_Check = Callable[[Any], bool]


def _is_int(least: int, most: int = _INT64 - 1) -> _Check:
    return lambda value: type(value) is int and least <= value <= most


def _is_number(least: float, most: float) -> _Check:
    # False for NaN, too.
    return lambda value: type(value) in (int, float) and least <= value <= most


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


# Field, what holds of a right value, and the same in words.
_RULES: tuple[tuple[str, _Check, str], ...] = (
    ("max_tokens", _is_int(0), "an integer of at least 0"),
    ("seed", _is_int(-_INT64), "an integer of 64 bits"),
    ("temperature", _is_number(0, 2), "a number from 0 to 2"),
    ("top_k", _is_int(0), "an integer of at least 0, which turns it off"),
    ("top_p", _is_share, "a number above 0 and at most 1"),
    ("min_p", _is_number(0, 1), "a number from 0 to 1"),
    ("presence_penalty", _is_number(-2, 2), "a number from -2 to 2"),
    ("frequency_penalty", _is_number(-2, 2), "a number from -2 to 2"),
    ("repetition_penalty", _is_number(1e-6, 1e6), "a number from 1e-6 to 1e6"),
    ("min_tokens", _is_int(0), "an integer of at least 0"),
    ("logprobs", _or_none(_is_int(0)), "None or an integer of at least 0"),
    ("prompt_logprobs", _or_none(_is_int(0)), "None or an integer of at least 0"),
    ("thinking_budget", _or_none(_is_int(1)), "None or an integer of at least 1"),
)


def check_params(params: SamplingParams, vocab_size: int, model_topk: int | None) -> None:
    """Raise ValueError, naming field and value, for what the API would refuse as well.

    model_topk: tokens that the model's indexer selects; None for a model without one.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {_shown(params)}")
    for name, is_right, words in _RULES:
        value = getattr(params, name)
        if not is_right(value):
            raise ValueError(f"{name} is {_shown(value)}; it must be {words}")
    if params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens is {params.min_tokens}; max_tokens is {params.max_tokens}, which is less"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise ValueError(f"{name} is {getattr(params, name)}; there are {vocab_size} ids")
    _check_ids(params, vocab_size)
    if params.attention is not None:
        _check_rule(params.attention, model_topk)


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Stop ids, the keys and values of the bias and the id that ends thoughts."""
    is_id, ids = _is_int(0, vocab_size - 1), f"an id from 0 to {vocab_size - 1}"
    if not isinstance(params.stop_token_ids, list | tuple):
        raise ValueError(f"stop_token_ids is {_shown(params.stop_token_ids)}; it must be a list")
    for token_id in params.stop_token_ids:
        if not is_id(token_id):
            raise ValueError(f"stop_token_ids has {_shown(token_id)}; it must be {ids}")
    if not isinstance(params.logit_bias, dict):
        raise ValueError(f"logit_bias is {_shown(params.logit_bias)}; it must be a dict")
    for token_id, bias in params.logit_bias.items():
        if not is_id(token_id):
            raise ValueError(f"logit_bias has the key {_shown(token_id)}; it must be {ids}")
        if not _is_number(-100, 100)(bias):
            raise ValueError(f"logit_bias has {_shown(bias)}; it must be a number from -100 to 100")
    if params.thinking_budget is not None and not is_id(params.end_think_id):
        raise ValueError(f"end_think_id is {_shown(params.end_think_id)}; it must be {ids}")


def _check_rule(rule: AttentionRule, model_topk: int | None) -> None:
    if model_topk is None:
        raise ValueError("attention needs a model with an indexer; this one has none")
    if rule.mode not in ("auto", "dense", "sparse"):
        raise ValueError(f"attention.mode is {_shown(rule.mode)}; it must be auto, dense or sparse")
    topk = rule.index_topk
    if not _or_none(_is_int(1, model_topk))(topk):
        raise ValueError(f"index_topk is {_shown(topk)}; it must be from 1 to {model_topk}")
    if topk is not None and rule.mode == "dense":
        raise ValueError("index_topk does not go together with dense attention")


def check_prompt(prompt: str | Sequence[int]) -> None:
    """Raise ValueError for what is neither a text nor a sequence of ids."""
    if isinstance(prompt, str):
        return
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise ValueError(f"it must be a text or a list of ids, not {_shown(prompt)}")
    for token_id in prompt:
        if type(token_id) is not int:
            raise ValueError(f"its ids must be int, not {_shown(token_id)}")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 64 else f"{text[:61]}..."
