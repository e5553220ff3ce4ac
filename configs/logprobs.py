"""The score of one token: what the model measures and the messages carry."""

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token's natural-log probability, its rank (1 is the likeliest) and its alternatives."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
