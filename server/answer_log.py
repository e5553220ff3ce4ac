"""What is noted of every HTTP answer: its count, and of those that generate a line and a span.

The line, of a JSON log, and the span, where traces are asked for, say how much and how long, never
what: no prompt, no answer, no key.
"""

import logging
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from .generation import Generation
from .metrics import Metrics
from .tracing import Tracing

_log = logging.getLogger(__name__)


class AnswerLog:
    """Hears of every answer from the gate."""

    def __init__(
        self, metrics: Metrics, writes_lines: bool, tracing: Tracing | None = None
    ) -> None:
        self._metrics = metrics
        self._writes_lines = writes_lines
        self._tracing = tracing

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        """An answer is complete, or its client has left."""
        route, state = _route(scope), scope["state"]
        self._metrics.count_http(route, status)
        generation: Generation | None = state.get("generation")
        if generation is None or not (self._writes_lines or self._tracing):
            return
        usage = generation.usage()
        fields: dict[str, Any] = {
            "request_id": state["request_id"],
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            "first_token_seconds": generation.first_token_seconds,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": generation.finish_reasons,
        }
        if self._writes_lines:
            _log.info("request", extra={"fields": fields})
        if self._tracing is not None:
            self._tracing.note(Headers(scope=scope), fields, generation)


def _route(scope: Scope) -> str:
    """The route's pattern, so that no path of a client becomes a label."""
    route = scope.get("route")
    return "unmatched" if route is None else route.path
