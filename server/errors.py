"""Errors in the one shape clients know: `{"error": {"message", "type", "param", "code"}}`.

SDKs choose the exception class by the status and show `error.message`; a body of any other shape
reaches their users as an empty text. Some clients act on the words of a message, so those are
fixed here too.
"""

from collections.abc import Mapping

import msgspec

_RETRY = {"retry-after": "1"}


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Envelope(msgspec.Struct):
    error: _Detail


class ApiError(Exception):
    """A refusal with its HTTP status; `param` is the path of the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON of this error; a server's own fault has another type than a client's."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        detail = _Detail(self.message, kind, self.param, self.code)
        return msgspec.json.encode(_Envelope(detail))


def shown(value: object) -> str:
    """A value from a request as it may appear in a message: escaped, at most 64 characters."""
    text = ascii(value[:80]) if isinstance(value, str | bytes) else _bounded(value)
    return text if len(text) <= 64 else text[:61] + "..."


def _bounded(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if len(value) > 8 else ascii(value[:8])
    if isinstance(value, dict):
        return f"an object of {len(value)} entries"
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return "an integer of more than 40 digits"
    return ascii(value)


def invalid_json(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def invalid_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def invalid_schema(param: str, message: str) -> ApiError:
    """For schemas, regular expressions and grammars; `param` goes down to the part at fault."""
    return ApiError(400, message, code="invalid_schema", param=param)


def unsupported(param: str, message: str | None = None) -> ApiError:
    text = message or f"{param} is not supported by this server"
    return ApiError(400, text, code="unsupported_parameter", param=param)


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def body_too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )


def model_not_found(name: str, served: str) -> ApiError:
    message = f"The model {shown(name)} does not exist; this server serves '{served}'"
    return ApiError(404, message, code="model_not_found", param="model")


def context_length_exceeded(param: str, limit: int, prompt: str, output: int | None) -> ApiError:
    """`prompt` is the number of prompt tokens, or a lower bound in words."""
    asked = f" and {output} tokens were asked for the output" if output is not None else ""
    message = (
        f"This model's maximum context length is {limit} tokens. "
        f"However, the prompt holds {prompt} tokens{asked}. Please shorten it"
    )
    return ApiError(400, message, code="context_length_exceeded", param=param)


def rate_limited(message: str, wait: int) -> ApiError:
    """`wait`: seconds after which it is worth trying again."""
    headers = {"retry-after": str(wait)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def output_too_long(param: str, limit: int, asked: int) -> ApiError:
    """More output than prompt and output together may have: the prompt is not at fault."""
    message = (
        f"This model's maximum context length is {limit} tokens, prompt and output together. "
        f"However, {param} is {asked}. Please lower it"
    )
    return ApiError(400, message, code="context_length_exceeded", param=param)


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, code="server_overloaded", headers=_RETRY)


def waited_too_long() -> ApiError:
    text = "The request waited too long to be run"
    return ApiError(503, text, code="queue_timeout", headers=_RETRY)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="service_unavailable", headers=_RETRY)


def internal() -> ApiError:
    """What a client may know about a fault; the log has the rest."""
    return ApiError(500, "The server failed on this request", code="internal_error")
