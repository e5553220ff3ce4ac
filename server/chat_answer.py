"""Chat answers as clients read them: `chat.completion` objects and their chunks.

Reasoning goes out under both names that clients read. The id of a call is made from the prompt, the
choice and the call's place, so a streamed answer and a whole one of the same request name it alike.
"""

import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from .answers import (
    Answer,
    AssistantMessage,
    Call,
    CallDelta,
    CalledFunction,
    ChatChoice,
    Delta,
    DeltaChoice,
)
from .chat import ChatPrompt
from .chat_protocol import ChatRequest
from .logprobs import chat_logprobs, prompt_logprobs
from .parsers.events import CallArgs, CallStart
from .sequence import Update
from .service import Service


class ChatRenderer:
    """Updates as chat answers."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        prompt: ChatPrompt,
        answer_id: str,
    ) -> None:
        self._tokenizer = service.tokenizer
        self._request = request
        self._prompt_ids = prompt.ids
        self._id = answer_id
        self._call_key = prompt.call_key
        self._model = service.model_name
        self._created = int(time.time())

    def bare(self) -> Answer:
        options = self._request.stream_options
        usage = None if options is not None and options.include_usage else UNSET
        kind = "chat.completion.chunk" if self._request.stream else "chat.completion"
        return Answer(self._id, kind, self._created, self._model, [], usage)

    def opening(self) -> list[Answer]:
        """The role of each choice, and the prompt's ids with the first."""
        chunks = [
            self._chunk(DeltaChoice(index, Delta(role="assistant", content="")))
            for index in range(self._request.n)
        ]
        if self._request.return_token_ids:
            chunks[0].prompt_token_ids = self._prompt_ids
        return chunks

    def chunk(self, index: int, update: Update) -> Answer | None:
        delta = Delta()
        shows = update.finish_reason is not None
        if update.content:
            delta.content = update.content
            shows = True
        if update.reasoning and self._request.include_reasoning:
            delta.reasoning_content = delta.reasoning = update.reasoning
            shows = True
        if update.calls:
            delta.tool_calls = self._call_deltas(index, update.calls)
            shows = True
        choice = DeltaChoice(
            index, delta, finish_reason=update.finish_reason, stop_reason=update.stop_reason
        )
        if self._request.logprobs and update.token_ids:
            choice.logprobs = chat_logprobs(self._tokenizer, update.token_ids, update.logprobs)
            shows = True
        if self._request.return_token_ids:
            choice.token_ids = update.token_ids
            shows = shows or bool(update.token_ids)
        return self._chunk(choice) if shows else None

    def whole(self, updates: Sequence[Update]) -> Answer:
        answer = self.bare()
        answer.choices = [self._whole(index, update) for index, update in enumerate(updates)]
        if self._request.return_token_ids:
            answer.prompt_token_ids = self._prompt_ids
        if self._request.prompt_logprobs is not None:
            entries = updates[0].prompt_logprobs or []
            answer.prompt_logprobs = prompt_logprobs(self._tokenizer, self._prompt_ids, entries)
        return answer

    def _chunk(self, choice: DeltaChoice) -> Answer:
        answer = self.bare()
        answer.choices.append(choice)
        return answer

    def _whole(self, index: int, update: Update) -> ChatChoice:
        request = self._request
        calls = self._calls(index, update.calls)
        message = AssistantMessage(
            content=update.content or (None if calls or update.reasoning else "")
        )
        if update.reasoning and request.include_reasoning:
            message.reasoning_content = message.reasoning = update.reasoning
        if calls:
            message.tool_calls = calls
        choice = ChatChoice(
            index, message, finish_reason=update.finish_reason, stop_reason=update.stop_reason
        )
        if request.logprobs:
            choice.logprobs = chat_logprobs(self._tokenizer, update.token_ids, update.logprobs)
        if request.return_token_ids:
            choice.token_ids = update.token_ids
        return choice

    def _call_id(self, choice: int, start: CallStart) -> str:
        return start.id or f"call_{self._call_key}{choice:02x}{start.index:02x}"

    def _call_deltas(self, choice: int, parts: Sequence[CallStart | CallArgs]) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        for part in parts:
            if isinstance(part, CallStart):
                call_id: str | UnsetType = self._call_id(choice, part)
                function = CalledFunction("", part.name)
                deltas.append(CallDelta(part.index, function, call_id, "function"))
            else:
                deltas.append(CallDelta(part.index, CalledFunction(part.text)))
        return deltas

    def _calls(self, choice: int, parts: Sequence[CallStart | CallArgs]) -> list[Call]:
        calls: dict[int, Call] = {}
        for part in parts:
            if isinstance(part, CallStart):
                function = CalledFunction("", part.name)
                calls[part.index] = Call(self._call_id(choice, part), function)
            else:
                calls[part.index].function.arguments += part.text
        return list(calls.values())
