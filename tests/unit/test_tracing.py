"""Spans of requests: times, counts and the caller's trace, and nothing of what was said."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from minidsa.server.answer_log import AnswerLog
from minidsa.server.gate import Gate
from minidsa.server.tracing import Tracing, connect_tracing
from patience import PATIENCE
from scripted_engine import EOS, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_request_that_generates_is_a_span_of_its_callers_trace():
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    async with serving(lambda submit: [120, 121, EOS]) as bed:
        assert isinstance(bed.app, Gate)
        bed.app._note = AnswerLog(bed.service.metrics, False, tracing).note
        headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "xyzzy", "n": 2, "stream": True, "seed": 1}
        assert (await bed.client.post("/v1/completions", json=body, headers=headers)).text
        assert (await bed.client.get("/health")).status_code == 200
    tracing.close()
    span: Any
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    told = dict(span.attributes)
    assert told["gen_ai.request.id"] == "mine"
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.request.n"]) == (6, 2)
    assert told["gen_ai.response.finish_reasons"] == ("stop", "stop")
    seconds = (span.end_time - span.start_time) / 1e9
    assert 0 <= told["gen_ai.latency.time_to_first_token"] <= seconds
    assert "xyzzy" not in span.to_json()


def test_spans_reach_a_collector():
    seen = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, len(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: stderr is for failures."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        tracing = connect_tracing(f"http://127.0.0.1:{server.server_port}/v1/traces")
        assert tracing is not None
        tracing._tracer.start_span("one").end()
        tracing.close()
        server.shutdown()
        thread.join()
    assert seen and seen[0][0] == "/v1/traces" and seen[0][1] > 0


def test_a_collector_that_does_not_answer_delays_the_end_for_a_bounded_time():
    asked, free = threading.Event(), threading.Event()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            asked.set()
            free.wait()
            return super().export(spans)

    exporter = Stuck()
    tracing = Tracing(exporter)
    for _ in range(2000):  # several batches
        tracing._tracer.start_span("one").end()
    closing = threading.Thread(target=tracing.close, daemon=True)
    closing.start()
    assert asked.wait(PATIENCE)
    closing.join(PATIENCE)
    assert not closing.is_alive() and not exporter.get_finished_spans()
    free.set()


def test_no_endpoint_is_no_tracing_and_a_wrong_one_is_told(monkeypatch):
    assert connect_tracing(None) is None
    with pytest.raises(ValueError, match="must be a URL"):
        connect_tracing("localhost:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"pip install opentelemetry-sdk"):
        connect_tracing("http://localhost:4318/v1/traces")
