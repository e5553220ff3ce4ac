"""Counts of what the engine did since it started; free of torch, cheap enough for every step."""

from bisect import bisect_left
from dataclasses import dataclass, field

from ..attention.sparse.selection_counts import SelectionCounts
from ..kv_cache.cache import KvCache
from .messages import DraftStats, EngineStats, SelectionStats
from .roster import Roster

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass
class Counters:
    """Counters of work done; the gauges beside them are read from the scheduler itself.

    num_prompt_tokens: prompt tokens of requests whose prompt was computed to the end, each prompt
        once, however often a preemption made it start over.
    num_generation_tokens: tokens that were sampled and sent.
    num_prefix_queries, num_prefix_hits: prompt tokens of requests that looked into the prefix cache
        when they first ran, and those that they found there.
    step_seconds: time that steps took to compute; a step that failed is not among them.
    step_sizes: see EngineStats. selection: counted by the model's attention; None without indexer.
    """

    num_steps: int = 0
    step_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_step_tokens: int = 0
    step_sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    selection: SelectionCounts | None = None

    def count_step(self, num_tokens: int) -> None:
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        self.step_sizes[bisect_left(STEP_SIZES, num_tokens)] += 1


def engine_stats(
    roster: Roster, cache: KvCache, counters: Counters, drafts: DraftStats | None
) -> EngineStats:
    """The gauges of now and the counters, as they are sent."""
    return EngineStats(
        num_running=len(roster.running),
        num_waiting=len(roster.queue),
        num_pages=cache.pool.num_pages,
        num_free_pages=cache.num_available,
        num_cached_pages=len(cache.prefix),
        num_steps=counters.num_steps,
        step_seconds=counters.step_seconds,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generation_tokens=counters.num_generation_tokens,
        num_preemptions=counters.num_preemptions,
        num_prefix_queries=counters.num_prefix_queries,
        num_prefix_hits=counters.num_prefix_hits,
        num_evictions=cache.num_evictions,
        num_host_pages=0 if cache.tier is None else len(cache.tier),
        num_host_loads=cache.num_loads,
        num_step_tokens=counters.num_step_tokens,
        step_sizes=tuple(counters.step_sizes),
        drafts=drafts,
        selection=_selection_stats(counters.selection),
    )


def _selection_stats(counts: SelectionCounts | None) -> SelectionStats | None:
    if counts is None:
        return None
    return SelectionStats(counts.num_timed, counts.seconds, counts.num_rows, counts.num_keys)
