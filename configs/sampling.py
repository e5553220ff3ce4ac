"""How one request's tokens are chosen: the part of a request that reaches the sampler."""

from typing import Literal

import msgspec

_MASK64 = (1 << 64) - 1


def mix64(word: int) -> int:
    """A 64-bit word whose every bit depends on every bit of `word`.

    SplitMix64's finalizer (Steele, Lea and Flood, 2014), which seeds and draws are made with.
    """
    z = word & _MASK64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK64
    return z ^ (z >> 31)


class AttentionRule(msgspec.Struct, frozen=True):
    """What a request's tokens attend to, where it is not what the model was made for.

    "dense": every token before them, however long the request. "sparse": the `index_topk` best
    (None: as many as the model's), also while there are no more. "auto" is dense up to so many
    tokens and sparse above, as without a rule.
    """

    mode: Literal["auto", "dense", "sparse"] = "auto"
    index_topk: int | None = None

    @property
    def salt(self) -> str:
        """Rows computed under another rule are other rows, so they are cached apart."""
        return f"attention {self.mode} {self.index_topk}"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling settings of one request; every value is already validated and resolved.

    `stop_token_ids` holds every id that ends the request, EOS included unless it is ignored; none
    of them is honoured before `min_tokens` outputs. `logprobs` counts the alternatives reported
    beside the chosen token (0: the chosen one alone; None: nothing). Behind `thinking_budget`
    outputs without `end_think_id` that id is chosen, whatever the model prefers. Logprobs are of
    the model's own distribution, before bias, penalties and temperature. A request's draws depend
    on `seed` and the position alone, never on its batch mates. `attention` needs a model with an
    indexer.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_budget: int | None = None
    end_think_id: int = -1
    attention: AttentionRule | None = None
