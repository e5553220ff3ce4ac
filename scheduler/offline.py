"""The engine without a server: a script hands over prompts and gets their tokens back.

    from minidsa.configs.sampling import SamplingParams
    from minidsa.scheduler.offline import OfflineEngine
    from minidsa.server.tokenizer import Tokenizer

    engine = OfflineEngine.load("checkpoints/tiny-dsa", Tokenizer.from_directory)
    greedy = SamplingParams(max_tokens=20, seed=0, temperature=0.0, logprobs=0)
    for answer in engine.generate(["Once upon a time"], greedy):
        print(answer.text, answer.token_ids, answer.logprobs)

It is the same scheduler over the same runner as behind the HTTP server, in this process, so the
tokens are the same. What is missing is what belongs to the server: chats, stop strings, grammars.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from ..configs.engine import EngineConfig
from ..configs.engine_info import EngineInfo
from ..configs.logprobs import TokenLogprobs
from ..configs.sampling import SamplingParams
from ..model.loading import check_start
from .admission import Refused
from .launch import Runner
from .messages import FinishReason, RequestOutput, Submit
from .offline_checks import check_params, check_prompt
from .pipeline import Pipeline
from .scheduler import Scheduler
from .worker import new_scheduler


class TextCodec(Protocol):
    """Text to ids and back; `server.tokenizer.Tokenizer` is one."""

    def encode_text(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class GenerationFailed(RuntimeError):
    """The engine could not compute some of the prompts; the text says which and why."""


@dataclass
class Generated:
    """One prompt and what was generated behind it.

    token_ids: a stop id that ended it is the last. text: without special tokens; empty where the
    engine has no tokenizer. logprobs and prompt_logprobs: as `SamplingParams` asks, one entry for
    each of token_ids, and for each prompt token but the first.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    def take(self, output: RequestOutput) -> None:
        """Add what one step brought."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.finish_reason, self.error = output.finish_reason, output.error


class OfflineEngine:
    """A loaded checkpoint; `load` one, then call `generate` as often as you like.

    Not for use from several threads. Prefixes stay cached from one call to the next.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, info: EngineInfo, text: TextCodec | None = None
    ) -> None:
        """Use `load`."""
        self._pipeline = Pipeline(runner, scheduler)
        self._scheduler = scheduler
        self._text = text
        self._names = count()
        self.info = info

    @classmethod
    def load(
        cls,
        model: str | Path,
        tokenizer: Callable[[Path], TextCodec] | None = None,
        config: EngineConfig | None = None,
    ) -> "OfflineEngine":
        """Load the checkpoint in the folder `model`.

        tokenizer: reads the folder's tokenizer; without one prompts are ids, and answers too.
        config: settings beside the folder. Raises SettingError for a setting and ValueError for a
        checkpoint that cannot be served.
        """
        config = replace(config or EngineConfig(), model=str(model))
        text = None if tokenizer is None else tokenizer(Path(model))
        loaded = check_start(config).load()
        scheduler = new_scheduler(config, loaded.info, loaded.kv_cache)
        return cls(loaded.runner, scheduler, loaded.info, text)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        ignore_eos: bool = False,
    ) -> list[Generated]:
        """Answers in the order of the prompts, each a text or a list of ids.

        params: for all prompts, or one for each; the model's EOS ids are added to their
        `stop_token_ids` unless `ignore_eos`. Nothing is computed before all of them are checked:
        raises ValueError for one that is wrong, with its place, its field and what is wrong, and
        GenerationFailed, once all others are done, where the engine failed on one.
        """
        if isinstance(prompts, str | bytes):
            raise ValueError("prompts is one text; it must be a list of prompts")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling parameters")
        ends = [] if ignore_eos else self.info.eos_token_ids
        answers: dict[str, Generated] = {}
        waiting: deque[Submit] = deque()
        for place, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                submit = self._submit(prompt, each, ends)
            except (ValueError, Refused) as error:
                raise ValueError(f"prompt {place}: {error}") from None
            answers[submit.request_id] = Generated(list(submit.prompt_ids))
            waiting.append(submit)
        try:
            self._run(waiting, answers)
        finally:
            for name in answers:
                self._scheduler.abort(name)
        return self._finished(list(answers.values()))

    def _submit(
        self, prompt: str | Sequence[int], params: SamplingParams, ends: Sequence[int]
    ) -> Submit:
        """A request after all checks; raises ValueError and Refused."""
        check_prompt(prompt)
        check_params(params, self.info.vocab_size, self.info.index_topk)
        name = f"offline-{next(self._names)}"
        submit = Submit(name, self._ids(prompt), _ending_at(params, ends))
        self._scheduler.limits.verify(submit)
        return submit

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._text is None:
            raise ValueError("it is text, but the engine was loaded without a tokenizer")
        return self._text.encode_text(prompt)

    def _run(self, waiting: deque[Submit], answers: dict[str, Generated]) -> None:
        scheduler, seats = self._scheduler, self.info.max_num_seqs
        while waiting or scheduler.has_work:
            while waiting and len(scheduler.running) + len(scheduler.queue) < seats:
                scheduler.add(waiting.popleft())
            for output in self._pipeline.advance()[1]:
                answers[output.request_id].take(output)

    def _finished(self, answers: list[Generated]) -> list[Generated]:
        failed = [(i, answer.error) for i, answer in enumerate(answers) if answer.error is not None]
        if failed:
            place, error = failed[0]
            raise GenerationFailed(f"{len(failed)} prompts failed; prompt {place}: {error}")
        if self._text is not None:
            for answer in answers:
                answer.text = self._text.decode(answer.token_ids, skip_special_tokens=True)
        return answers


def _ending_at(params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    ends = list(dict.fromkeys([*token_ids, *params.stop_token_ids]))
    return msgspec.structs.replace(params, stop_token_ids=ends)
