"""What is noted of every HTTP answer: its count, and in a JSON log a line for those that generate.

The line says how much and how long, never what: no prompt, no answer, no key.
"""

import logging
from typing import Any

from starlette.types import Scope

from .generation import Generation
from .metrics import Metrics

_log = logging.getLogger(__name__)


class AnswerLog:
    """Hears of every answer from the gate."""

    def __init__(self, metrics: Metrics, writes_lines: bool) -> None:
        self._metrics = metrics
        self._writes_lines = writes_lines

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        """An answer is complete, or its client has left."""
        route, state = _route(scope), scope["state"]
        self._metrics.count_http(route, status)
        generation: Generation | None = state.get("generation")
        if not self._writes_lines or generation is None:
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
        _log.info("request", extra={"fields": fields})


def _route(scope: Scope) -> str:
    """The route's pattern, so that no path of a client becomes a label."""
    route = scope.get("route")
    return "unmatched" if route is None else route.path
