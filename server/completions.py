"""POST /v1/completions: everything that is checked and encoded before its first token.

Every prompt has n choices; choice k of prompt p has index p * n + k.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import structs

from .bodies import Body
from .chat_encoding import BOS
from .completion_answer import Prompt
from .detokenizer import Detokenizer
from .errors import context_length_exceeded, invalid_value, unsupported
from .generation import Choice
from .grammars import answer_grammar
from .long_text import in_thread_if_long
from .prompt_runs import Control
from .protocol import CompletionRequest
from .sampling import (
    OutputShape,
    asked_tokens,
    check_sampling,
    child_seed,
    limit_field,
    resolve,
)
from .sequence import ChoiceText, EndRules, RawText
from .service import Service
from .tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
TAIL = 8
"""Ids of a prompt that are enough to finish a character it ends in."""

FIM_BEGIN = Control("<｜fim▁begin｜>")
FIM_HOLE = Control("<｜fim▁hole｜>")
FIM_END = Control("<｜fim▁end｜>")


class PreparedCompletion(NamedTuple):
    """A request after all checks: its prompts, and n choices for each."""

    request: CompletionRequest
    prompts: list[Prompt]
    choices: list[Choice]


async def prepare_completion(service: Service, body: Body[CompletionRequest]) -> PreparedCompletion:
    """Check everything about a request and encode it; raises ApiError."""
    request = body.fields
    service.check_model(request.model)
    check_sampling(request, service.info, service.max_tokens)
    service.check_sequences(len(request.prompt), request.n)
    asked = asked_tokens(request)
    if asked == 0 and not request.echo:
        name = limit_field(request)
        raise invalid_value(name, f"{name} 0 needs echo")
    prompts = await in_thread_if_long(body.size, _encode_all, service, request, asked)
    budget = service.config.limits.max_request_tokens
    if sum(len(prompt.ids) for prompt in prompts) > budget:
        raise invalid_value("prompt", f"the prompts hold more than {budget} tokens together")
    seed = service.seeds.draw() if request.seed is None else request.seed
    rules = end_rules(request)
    choices: list[Choice] = []
    for prompt in prompts:
        choices += _choices(service, request, prompt, rules, seed)
    grammar = await answer_grammar(service, request)
    return PreparedCompletion(request, prompts, [replace(c, grammar=grammar) for c in choices])


def _choices(
    service: Service, request: CompletionRequest, prompt: Prompt, rules: EndRules, seed: int
) -> list[Choice]:
    asked = asked_tokens(request)
    max_tokens = service.output_limit("prompt", len(prompt.ids), asked, DEFAULT_MAX_TOKENS)
    if request.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens", f"min_tokens {request.min_tokens} is above max_tokens {max_tokens}"
        )
    scored = [request.prompt_logprobs, request.logprobs if request.echo else None]
    shape = OutputShape(
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
    )
    params = resolve(request, shape, service.defaults, seed, service.info)
    choices = []
    for child in range(request.n):
        detokenizer = Detokenizer(
            service.tokenizer, prompt.ids[-TAIL:], request.skip_special_tokens
        )
        child_params = structs.replace(params, seed=child_seed(seed, child))
        choices.append(Choice(prompt.ids, child_params, ChoiceText(detokenizer, RawText(), rules)))
    return choices


def end_rules(request: Any) -> EndRules:
    """How the choices of a request end."""
    return EndRules(
        stops=request.stop,
        include_stop=request.include_stop_str_in_output or request.no_stop_trim,
        stop_token_ids=frozenset(request.stop_token_ids),
        min_tokens=request.min_tokens,
    )


def _encode_all(service: Service, request: CompletionRequest, asked: int | None) -> list[Prompt]:
    return [
        _encode_ids(service, request, prompt, asked)
        if isinstance(prompt, list)
        else _encode_text(service, request, prompt, asked)
        for prompt in request.prompt
    ]


def _encode_ids(
    service: Service, request: CompletionRequest, prompt: list[int], asked: int | None
) -> Prompt:
    if request.suffix:
        raise invalid_value("suffix", "suffix needs a prompt that is text")
    limit = service.info.vocab_size
    if min(prompt) < 0 or max(prompt) >= limit:
        raise invalid_value("prompt", f"token ids run from 0 to {limit - 1}")
    if len(prompt) > service.max_tokens:
        raise context_length_exceeded("prompt", service.max_tokens, str(len(prompt)), asked)
    if not request.echo:
        return Prompt(prompt, "", [])
    detokenizer = Detokenizer(service.tokenizer, (), request.skip_special_tokens)
    text = detokenizer.push(prompt) + detokenizer.flush()
    return Prompt(prompt, text, [0, *detokenizer.token_ends[:-1]])


def _encode_text(
    service: Service, request: CompletionRequest, prompt: str, asked: int | None
) -> Prompt:
    tokenizer = service.tokenizer
    service.check_fits("prompt", len(prompt) + len(request.suffix), asked)
    if request.suffix:
        return Prompt(_fill_in(service, request, prompt), prompt, [])
    ids = tokenizer.encode_text(prompt, request.add_special_tokens)
    if not ids:
        raise invalid_value("prompt", "the prompt holds no tokens")
    if not request.echo:
        return Prompt(ids, "", [])
    return Prompt(ids, prompt, _text_offsets(tokenizer, ids, prompt))


def _text_offsets(tokenizer: Tokenizer, ids: Sequence[int], prompt: str) -> list[int]:
    """Where the text of each token begins in the prompt."""
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids)
    # BOS was put in front of the text: it shows nothing.
    lead = max(0, (detokenizer.token_ends or [0])[-1] - len(prompt))
    return [max(0, end - lead) for end in (0, *detokenizer.token_ends[:-1])]


def _fill_in(service: Service, request: CompletionRequest, prompt: str) -> list[int]:
    if request.echo and request.logprobs is not None:
        raise unsupported("suffix", "echo with logprobs does not go together with suffix")
    runs = [FIM_BEGIN, prompt, FIM_HOLE, request.suffix, FIM_END]
    if request.add_special_tokens and BOS.literal in service.tokenizer.control:
        runs = [BOS, *runs]
    try:
        return service.tokenizer.encode_runs(runs)
    except ValueError as error:
        raise unsupported("suffix", f"suffix cannot be served: {error}") from None
