"""What every request handler needs, in one place: the model as loaded, its text side, its engine.

Made once at the start and handed over by the application; nothing else is shared between requests.
"""

import secrets
import time
from dataclasses import dataclass, field

from ..configs.engine_info import EngineInfo
from ..configs.server import ServerConfig
from .chat_formats import ChatFormat
from .engine_client import EngineClient
from .errors import context_length_exceeded, invalid_value, model_not_found
from .generation import Generation, Plan
from .grammar_trials import GrammarTrials
from .keys import Keyring
from .metrics import Metrics
from .sampling import SamplingDefaults, SeedSource
from .tokenizer import Tokenizer
from .tracing import Tracing


@dataclass(frozen=True)
class Service:
    """The parts of a running server. `generations` are the requests in flight by answer id."""

    config: ServerConfig
    model_name: str
    info: EngineInfo
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    defaults: SamplingDefaults
    client: EngineClient
    metrics: Metrics
    seeds: SeedSource
    trials: GrammarTrials
    keyring: Keyring | None = None
    tracing: Tracing | None = None
    notes: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    generations: dict[str, Generation] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """Prompt and output together: by the context, and by the pages there are."""
        return min(self.info.max_model_len, self.info.num_cache_tokens)

    @property
    def capacity(self) -> int:
        """Sequences in flight, running and queued."""
        return self.info.max_num_seqs + self.config.engine.scheduler.max_queue

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 unless `name` is the served model or empty."""
        if name not in ("", self.model_name):
            raise model_not_found(name, self.model_name)

    def check_sequences(self, prompts: int, choices: int) -> None:
        """Raise ApiError 400 for more sequences than one request may ever have."""
        limit = min(self.config.limits.max_sequences, self.capacity)
        if prompts * choices > limit:
            raise invalid_value(
                "prompt" if prompts > limit else "n",
                f"{prompts} prompts with {choices} choices each are more than the {limit} "
                "sequences that one request may have",
            )

    def check_fits(self, param: str, num_characters: int, asked: int | None) -> None:
        """Raise ApiError 400 for a text that is too long whatever its tokens are."""
        if not self.tokenizer.could_fit(num_characters, self.max_tokens):
            more = f"more than {self.max_tokens}"
            raise context_length_exceeded(param, self.max_tokens, more, asked)

    def output_limit(self, param: str, prompt: int, asked: int | None, default: int | None) -> int:
        """Tokens the answer may have; only a default is cut to what the context leaves."""
        limit = self.max_tokens
        left = limit - prompt
        if left < (1 if asked is None else asked) or left < 0:
            raise context_length_exceeded(param, limit, str(prompt), asked)
        if asked is not None:
            return asked
        return left if default is None else min(default, left)

    def answer_id(self, prefix: str, request_id: str) -> str:
        """An id for an answer, unique among those in flight."""
        name = f"{prefix}{request_id}"
        taken = any(generation.plan.id == name for generation in self.generations.values())
        return f"{name}-{secrets.token_hex(4)}" if taken else name

    def launch(self, plan: Plan) -> Generation:
        """Start a plan; raises ApiError 503 where there is no room. `land` it in the end."""
        self.client.check(len(plan.choices), self.capacity)
        generation = Generation(plan, self.client, self.metrics)
        generation.start()
        self.generations[generation.key] = generation
        return generation

    def land(self, generation: Generation) -> None:
        """Release what is left of a generation and forget it; safe to call again."""
        generation.close()
        self.generations.pop(generation.key, None)
