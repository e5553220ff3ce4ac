"""POST /v1/chat/completions: from messages to a prompt, and everything checked before a token.

The prompt of a chat is made here and nowhere else, so /tokenize shows exactly what generation sees.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import structs

from ..configs.sampling import SamplingParams
from .bodies import Body
from .chat_encoding import END_THINK
from .chat_formats import ChatFormat, StartState
from .chat_messages import InvalidMessagesError
from .chat_protocol import ChatMessage, ChatPromptFields, ChatRequest, NamedTool
from .chat_request import mark_prefill
from .completions import TAIL, end_rules
from .detokenizer import Detokenizer
from .errors import invalid_value, shown, unsupported
from .generation import Choice
from .grammars import chat_grammar
from .long_text import in_thread_if_long
from .prompt_runs import Run
from .sampling import (
    OutputShape,
    asked_tokens,
    check_sampling,
    child_seed,
    limit_field,
    resolve,
)
from .sequence import ChoiceText, EndRules
from .service import Service


@dataclass(frozen=True)
class ChatPrompt:
    """A chat's ids, what the model writes first, and the tools its parser should know."""

    ids: list[int]
    start: StartState
    tools: list[dict[str, Any]]

    @property
    def call_key(self) -> str:
        """Names the calls of this prompt's answers: other turns of the chat have other prompts."""
        return hashlib.blake2b(repr(self.ids).encode(), digest_size=8).hexdigest()


class PreparedChat(NamedTuple):
    """A request after all checks: its prompt and its n choices."""

    request: ChatRequest
    prompt: ChatPrompt
    choices: list[Choice]


async def encode_chat(
    service: Service,
    body: Body[Any],
    fields: ChatPromptFields,
    items: Sequence[ChatMessage],
    asked: int | None = None,
) -> ChatPrompt:
    """The prompt of a chat; the model sees the tools of the body as they were sent.

    Raises ApiError for messages that cannot be encoded or cannot fit.
    """
    chat_format = service.chat_format
    if chat_format is None:
        raise unsupported("messages", "the checkpoint has no chat format; use /v1/completions")
    tools = _tools(fields, body.document)

    def encode() -> ChatPrompt:
        runs = _runs(chat_format, fields, items, tools)
        # What was left out of the prompt, such as old thoughts, does not count.
        characters = sum(len(run) for run in runs if isinstance(run, str))
        service.check_fits("messages", characters, asked)
        ids = service.tokenizer.encode_runs(runs)
        return ChatPrompt(ids, chat_format.start(runs), tools)

    return await in_thread_if_long(body.size, encode)


def _runs(
    chat_format: ChatFormat,
    fields: ChatPromptFields,
    items: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]],
) -> list[Run]:
    messages = [item.convert(index) for index, item in enumerate(items)]
    thinking = fields.wants_thinking(chat_format.default_thinking)
    adds_prompt = fields.add_generation_prompt
    wanted = fields.response_format
    schema = None if wanted is None or wanted.json_schema is None else wanted.json_schema.schema_
    try:
        messages = mark_prefill(messages, fields.continue_final_message, adds_prompt)
        return chat_format.encode(messages, tools, thinking, adds_prompt is not False, schema)
    except InvalidMessagesError as error:
        raise invalid_value(error.param, f"{error.param}: {error}") from None


def _tools(fields: ChatPromptFields, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of the body, without nulls in their definitions; none with the choice "none"."""
    choice = fields.tool_choice
    names = {tool.function.name for tool in fields.tools}
    if choice == "required" and not names:
        raise invalid_value("tool_choice", "tool_choice 'required' needs tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        name = shown(choice.function.name)
        raise invalid_value(
            "tool_choice", f"tool_choice names {name}, which is not among the tools"
        )
    if choice == "none" or not fields.tools:
        return []
    return [
        {**tool, "function": {k: v for k, v in tool["function"].items() if v is not None}}
        for tool in document["tools"]
    ]


async def prepare_chat(service: Service, body: Body[ChatRequest]) -> PreparedChat:
    """Check everything about a request and encode it; raises ApiError."""
    request = body.fields
    info = service.info
    service.check_model(request.model)
    check_sampling(request, info, service.max_tokens)
    service.check_sequences(1, request.n)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs to be true")
    if not (request.include_reasoning or request.separate_reasoning):
        raise invalid_value(
            "include_reasoning", "include_reasoning false needs separate_reasoning to be true"
        )
    asked = asked_tokens(request)
    if asked == 0:
        name = limit_field(request)
        raise invalid_value(name, f"{name} must be at least 1, not 0")
    prompt = await encode_chat(service, body, request, request.messages, asked)
    max_tokens = service.output_limit("messages", len(prompt.ids), asked, None)
    if request.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens", f"min_tokens {request.min_tokens} is above max_tokens {max_tokens}"
        )
    shape = OutputShape(
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    seed = service.seeds.draw() if request.seed is None else request.seed
    params = resolve(request, shape, service.defaults, seed, info)
    params = _with_budget(service, request, prompt, params)
    rules = replace(end_rules(request), max_calls=None if request.parallel_tool_calls else 1)
    grammar = await chat_grammar(service, request, prompt.tools, prompt.start == "reasoning")
    choices = [
        Choice(
            prompt.ids,
            structs.replace(params, seed=child_seed(seed, child)),
            _choice_text(service, request, prompt, rules),
            grammar,
        )
        for child in range(request.n)
    ]
    return PreparedChat(request, prompt, choices)


def _with_budget(
    service: Service, request: ChatRequest, prompt: ChatPrompt, params: SamplingParams
) -> SamplingParams:
    budget = request.thinking_budget
    if budget is None:
        return params
    if prompt.start != "reasoning":
        raise invalid_value("thinking_token_budget", "thinking_token_budget needs thinking")
    (end_think_id,) = service.tokenizer.control_ids([END_THINK.literal])
    return structs.replace(params, thinking_budget=budget, end_think_id=end_think_id)


def _choice_text(
    service: Service, request: ChatRequest, prompt: ChatPrompt, rules: EndRules
) -> ChoiceText:
    chat_format = service.chat_format
    if chat_format is None:
        raise unsupported("messages")
    detokenizer = Detokenizer(
        service.tokenizer,
        prompt.ids[-TAIL:],
        request.skip_special_tokens,
        chat_format.markup_ids(service.tokenizer) if prompt.tools else (),
    )
    separate = request.separate_reasoning
    return ChoiceText(
        detokenizer,
        chat_format.parser(prompt.start, prompt.tools, separate),
        rules,
        thinking=prompt.start == "reasoning",
        separate=separate,
    )
