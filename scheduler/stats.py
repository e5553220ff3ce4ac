"""Counts of what the engine did since it started; free of torch, cheap enough for every step."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Counters of work done; the gauges beside them are read from the scheduler itself.

    num_prompt_tokens: prompt tokens of requests whose prompt was computed to the end, each prompt
        once, however often a preemption made it start over.
    num_generation_tokens: tokens that were sampled and sent.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
