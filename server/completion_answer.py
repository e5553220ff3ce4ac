"""Completions as clients read them: `text_completion` objects, whole or in chunks.

Echo shows the prompt once for each choice; with logprobs its scores come along, which is how
evaluation harnesses read the likelihood of a text.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, structs

from ..configs.logprobs import TokenLogprobs
from .answers import Answer, CompletionChoice, CompletionLogprobs
from .logprobs import completion_logprobs, prompt_logprobs
from .protocol import CompletionRequest
from .sequence import Update
from .service import Service


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, and what echo shows of it: its text and where each token's text begins."""

    ids: list[int]
    text: str
    offsets: list[int]


class CompletionRenderer:
    """Updates as `text_completion` objects."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        prompts: Sequence[Prompt],
        answer_id: str,
    ) -> None:
        self._tokenizer = service.tokenizer
        self._request = request
        self._prompts = prompts
        self._id = answer_id
        self._model = service.model_name
        self._created = int(time.time())
        self._scores_prompt = request.echo and request.logprobs is not None
        self._begun: set[int] = set()

    def bare(self) -> Answer:
        options = self._request.stream_options
        usage = None if options is not None and options.include_usage else UNSET
        return Answer(self._id, "text_completion", self._created, self._model, [], usage)

    def opening(self) -> list[Answer]:
        """Prompt texts and ids; a scored prompt has to wait for its scores."""
        if self._scores_prompt or not (self._request.echo or self._request.return_token_ids):
            return []
        indices = range(len(self._prompts) * self._request.n)
        return [self._answer(self._choice(index, Update())) for index in indices]

    def chunk(self, index: int, update: Update) -> Answer | None:
        has_more = update.finish_reason is not None or update.prompt_logprobs is not None
        shows_ids = self._request.return_token_ids or self._request.logprobs is not None
        if not (update.content or has_more or (shows_ids and update.token_ids)):
            return None
        return self._answer(self._choice(index, update))

    def whole(self, updates: Sequence[Update]) -> Answer:
        answer = self.bare()
        answer.choices = [self._choice(index, update) for index, update in enumerate(updates)]
        return answer

    def _answer(self, choice: CompletionChoice) -> Answer:
        answer = self.bare()
        answer.choices.append(choice)
        return answer

    def _choice(self, index: int, update: Update) -> CompletionChoice:
        request = self._request
        prompt = self._prompts[index // request.n]
        opens = index not in self._begun
        self._begun.add(index)
        echoes = request.echo and opens
        choice = CompletionChoice(
            index=index,
            text=prompt.text + update.content if echoes else update.content,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
        )
        if request.logprobs is not None:
            choice.logprobs = self._logprobs(prompt, update, echoes)
        if request.prompt_logprobs is not None:
            entries = _cut(update.prompt_logprobs or [], request.prompt_logprobs)
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, prompt.ids, entries)
        if request.return_token_ids:
            choice.token_ids = update.token_ids
            if opens:
                choice.prompt_token_ids = prompt.ids
        return choice

    def _logprobs(self, prompt: Prompt, update: Update, echoes: bool) -> CompletionLogprobs | None:
        shift = len(prompt.text) if self._request.echo else 0
        ids = list(update.token_ids)
        entries: list[TokenLogprobs | None] = list(update.logprobs)
        offsets = [offset + shift for offset in update.offsets]
        if echoes:
            scored = _cut(update.prompt_logprobs or [], self._request.logprobs or 0)
            ids = prompt.ids + ids
            entries = [None, *scored, *entries]
            offsets = prompt.offsets + offsets
        return completion_logprobs(self._tokenizer, ids, entries, offsets) if ids else None


def _cut(entries: Sequence[TokenLogprobs], count: int) -> list[TokenLogprobs]:
    """The entries with at most `count` alternatives each."""
    return [
        structs.replace(e, top_ids=e.top_ids[:count], top_logprobs=e.top_logprobs[:count])
        for e in entries
    ]
