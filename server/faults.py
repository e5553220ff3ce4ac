"""What a client is told when the engine ends its request with an error."""

import logging

from ..scheduler.messages import RequestOutput
from .errors import ApiError, overloaded, waited_too_long

_log = logging.getLogger(__name__)


def fault_of(output: RequestOutput) -> ApiError:
    """What a client is told about a sequence that ended with an error; the log has the rest."""
    _log.error("request %s failed: %s", output.request_id, output.error)
    if output.error_kind == "overloaded":
        return overloaded("The server is busy")
    if output.error_kind == "timeout":
        return waited_too_long()
    return ApiError(500, "The engine failed on this request", code="internal_error")
