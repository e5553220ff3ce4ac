"""Prometheus metrics, in a registry of their own.

Names end as vLLM's do, so that dashboards need one replacement. Gauges of the engine are read when
a scraper asks; only what is true today is exported.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..scheduler.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "tool_calls", "abort")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _EngineCollector(Collector):
    """The engine's gauges and counters at the moment of a scrape."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
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
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"minidsa:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"minidsa:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    def _accepted_at(self, counts: Sequence[int]) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "minidsa:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(counts):
            family.add_metric([self._model_name, str(position)], count)
        return family


class Metrics:
    """What the API process counts itself, and the engine's numbers beside it."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(model_name, stats))

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(
                f"minidsa:{name}", text, ["model_name"], registry=registry, buckets=buckets
            )
            return family.labels(model_name)

        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", _LONG)
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between tokens of a request", _SHORT
        )
        self.whole_request = histogram(
            "e2e_request_latency_seconds", "Arrival to last token", _LONG
        )
        finished = Counter(
            "minidsa:request_success",
            "Choices by how they finished",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in FINISH_REASONS}
        self._http = Counter(
            "minidsa:http_requests", "HTTP answers", ["route", "status"], registry=registry
        )

    def count_http(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class RequestTimes:
    """When the tokens of one request came."""

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self._last: float | None = None
        self.to_first: float | None = None

    def count(self, num_tokens: int, metrics: Metrics) -> None:
        """Tokens arrived now; those of one step share the time since the step before."""
        if num_tokens <= 0:
            return
        now = time.monotonic()
        if self._last is None:
            self.to_first = now - self._arrival
            metrics.first_token.observe(self.to_first)
        else:
            metrics.inter_token.observe((now - self._last) / num_tokens)
        self._last = now

    def finish(self, reasons: Iterable[str], metrics: Metrics) -> None:
        metrics.whole_request.observe(time.monotonic() - self._arrival)
        for reason in reasons:
            metrics.finished[reason].inc()
