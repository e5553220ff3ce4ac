"""Prometheus metrics, in a registry of their own.

Names end as vLLM's do, so that dashboards need one replacement, or none where the prefix is set to
`vllm`. Only what is true today is exported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..scheduler.messages import EngineStats
from .engine_metrics import EngineCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "tool_calls", "abort")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True)
class Observed:
    """The histograms of requests, in seconds."""

    first_token: Histogram
    inter_token: Histogram
    per_output_token: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    whole: Histogram


class Metrics:
    """What the API process counts itself, and the engine's numbers beside it."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], prefix: str = "minidsa"
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._model_name, self._prefix = model_name, prefix
        registry.register(EngineCollector(prefix, model_name, stats))

        def histogram(name: str, text: str, buckets: Sequence[float] = _LONG) -> Histogram:
            family = Histogram(
                f"{prefix}:{name}", text, ["model_name"], registry=registry, buckets=buckets
            )
            return family.labels(model_name)

        self.observed = Observed(
            first_token=histogram("time_to_first_token_seconds", "Arrival to first token"),
            inter_token=histogram(
                "inter_token_latency_seconds", "Between tokens of a choice", _SHORT
            ),
            per_output_token=histogram(
                "request_time_per_output_token_seconds",
                "Mean time between the tokens of a choice",
                _SHORT,
            ),
            queue=histogram("request_queue_time_seconds", "Arrival of a choice to its first step"),
            prefill=histogram(
                "request_prefill_time_seconds", "First step of a choice to its first token"
            ),
            decode=histogram("request_decode_time_seconds", "First token of a choice to its last"),
            whole=histogram("e2e_request_latency_seconds", "Arrival to last token"),
        )
        finished = Counter(
            f"{prefix}:request_success",
            "Choices by how they finished",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in FINISH_REASONS}
        self._http = Counter(
            f"{prefix}:http_requests",
            "HTTP answers",
            ["model_name", "route", "status"],
            registry=registry,
        )

    def describe_cache(
        self, *, page_size: int, num_pages: int, dtype: str, prefix_reuse: bool
    ) -> None:
        """Export the cache as it was made: a gauge of 1 whose labels say it; once."""
        labels = {
            "model_name": self._model_name,
            "block_size": page_size,
            "cache_dtype": dtype,
            "enable_prefix_caching": str(prefix_reuse).lower(),
            "num_gpu_blocks": num_pages,
        }
        Gauge(
            f"{self._prefix}:cache_config_info",
            "1; tokens of a page, format of its rows, and how many pages there are, on any device",
            list(labels),
            registry=self._registry,
        ).labels(**labels).set(1)

    def count_http(self, route: str, status: int) -> None:
        self._http.labels(self._model_name, route, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)
