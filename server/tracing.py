"""A span for each request that generates, for OpenTelemetry: behind an extra and a flag.

A span is made once its request has ended, from its times and counts, so tracing costs nothing while
tokens are on their way. It is a child of the caller's where the request has a `traceparent`. Like
the log it holds no prompt, no answer and no key. Names are those of OpenTelemetry's conventions for
generative models and of vLLM's spans.
"""

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from .generation import Generation

SERVICE = "minidsa"
EXPORT_SECONDS = 2.0
"""How long a collector may take for a batch, and how long the server waits when it leaves."""


class Tracing:
    """Spans to one exporter, in batches, from a thread of its own. `close` sends what is left."""

    def __init__(self, exporter: Any) -> None:
        """exporter: an OpenTelemetry SpanExporter. Raises ImportError without the extra."""
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - an extra
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - an extra
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - an extra
            TraceContextTextMapPropagator,
        )

        resource = Resource.create({"service.name": SERVICE})
        # At the exit of the process nobody would bound what `close` bounds.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()

    def note(
        self, headers: Mapping[str, str], fields: Mapping[str, Any], generation: Generation
    ) -> None:
        """A request has ended just now; fields: what the log says of it."""
        end = time.time_ns()
        attributes = {
            "http.route": fields["route"],
            "http.response.status_code": fields["status"],
            "gen_ai.request.id": fields["request_id"],
            "gen_ai.usage.input_tokens": fields["prompt_tokens"],
            "gen_ai.usage.output_tokens": fields["completion_tokens"],
            "gen_ai.usage.cached_tokens": fields["cached_tokens"],
            "gen_ai.response.finish_reasons": fields["finish_reasons"],
            "gen_ai.request.n": len(generation.plan.choices),
        }
        if fields["first_token_seconds"] is not None:
            attributes["gen_ai.latency.time_to_first_token"] = fields["first_token_seconds"]
        span = self._tracer.start_span(
            f"POST {fields['route']}",
            context=self._propagator.extract(dict(headers)),
            kind=self._kind,
            attributes=attributes,
            start_time=end - round(1e9 * fields["seconds"]),
        )
        span.end(end)

    def close(self) -> None:
        """Send what is left; what a slow collector has not taken in time is dropped."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(EXPORT_SECONDS)


def connect_tracing(endpoint: str | None) -> Tracing | None:
    """Tracing to a collector that speaks OTLP over HTTP; None where no endpoint is set.

    Raises ValueError, in one line that says what to install, without the extra.
    """
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"otlp_traces_endpoint is {endpoint}; it must be a URL such as "
            "http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - an extra
            OTLPSpanExporter,
        )

        return Tracing(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS))
    except ImportError as error:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise ValueError(
            "otlp_traces_endpoint needs OpenTelemetry: "
            f"{sys.executable} -m pip install {packages} ({error})"
        ) from None
