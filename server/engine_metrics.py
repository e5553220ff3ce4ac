"""The engine's numbers for Prometheus, read from its last message when a scraper asks."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..scheduler.messages import EngineStats
from ..scheduler.stats import STEP_SIZES


class EngineCollector(Collector):
    """The engine's gauges and counters at the moment of a scrape."""

    def __init__(self, prefix: str, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        now = self._stats()
        used = now.num_pages - now.num_free_pages
        gauges = (
            ("num_requests_running", "Requests in the running batch", now.num_running),
            ("num_requests_waiting", "Requests in the queue", now.num_waiting),
            ("kv_cache_usage_perc", "Share of cache pages in use", used / (now.num_pages or 1)),
            ("host_cache_pages", "Pages kept in host memory", now.num_host_pages),
            ("prefix_cache_pages", "Pages that can be found by their prefix", now.num_cached_pages),
        )
        counters = (
            (
                "prompt_tokens",
                "Prompt tokens of requests, found in the cache or computed",
                now.num_prompt_tokens,
            ),
            ("generation_tokens", "Tokens generated", now.num_generation_tokens),
            ("engine_steps", "Steps computed", now.num_steps),
            ("engine_step_seconds", "Time that steps took to compute", now.step_seconds),
            ("num_preemptions", "Requests put back into the queue", now.num_preemptions),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the cache",
                now.num_prefix_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the cache", now.num_prefix_hits),
            ("host_cache_loads", "Pages that came back from host memory", now.num_host_loads),
            ("prefix_cache_evictions", "Cached pages given up for room", now.num_evictions),
        )
        if (drafts := now.drafts) is not None:
            gauges += (("spec_decode_length", "Drafts that a step verifies now", drafts.length),)
            counters += (
                ("spec_decode_num_drafts", "Verify passes of one request", drafts.num_drafts),
                ("spec_decode_num_draft_tokens", "Drafts verified", drafts.num_draft_tokens),
                (
                    "spec_decode_num_accepted_tokens",
                    "Drafts accepted",
                    drafts.num_accepted_tokens,
                ),
            )
            yield self._accepted_at(drafts.accepted_at)
        if (selection := now.selection) is not None:
            yield self._mean(
                "indexer_time_seconds",
                "Selections of one layer that no CUDA graph replayed, and their time",
                selection.num_timed,
                selection.seconds,
            )
            yield self._mean(
                "sparse_topk_used",
                "Requests in steps that selected, and keys that the newest token attended to",
                selection.num_rows,
                selection.num_keys,
            )
        yield self._step_sizes(now)
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    def _accepted_at(self, counts: Sequence[int]) -> CounterMetricFamily:
        family = CounterMetricFamily(
            f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(counts):
            family.add_metric([self._model_name, str(position)], count)
        return family

    def _mean(self, name: str, text: str, count: int, total: float) -> SummaryMetricFamily:
        """A count and a sum, whose quotient is the mean."""
        family = SummaryMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], count, total)
        return family

    def _step_sizes(self, now: EngineStats) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            f"{self._prefix}:iteration_tokens_total", "Tokens of a step", labels=["model_name"]
        )
        # Before the first step is heard of there are no counts at all.
        counts = now.step_sizes or (0,) * (len(STEP_SIZES) + 1)
        edges = (*(floatToGoString(size) for size in STEP_SIZES), "+Inf")
        buckets = list(zip(edges, accumulate(counts), strict=True))
        family.add_metric([self._model_name], buckets, now.num_step_tokens)
        return family
