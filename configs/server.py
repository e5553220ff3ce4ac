"""Settings of the API process: where it listens, what it accepts, how it stops.

The engine's settings are a part of it, so that one file and one list of flags describe a server.
"""

from dataclasses import dataclass, field
from typing import Literal

from .engine import EngineConfig

ChatFormatName = Literal["deepseek_v32", "jinja"]
ChatFormatChoice = Literal["auto", ChatFormatName]


@dataclass(frozen=True)
class LimitsConfig:
    """What one client may cost before a request is refused."""

    max_body_bytes: int = 4 * 1024 * 1024
    """Bytes of a request body; more is answered 413."""
    max_header_bytes: int = 32 * 1024
    """Bytes of a request line with its headers; more is answered 431."""
    header_seconds: float = 8.0
    """Time for the headers of a request to arrive in full."""
    body_seconds: float = 30.0
    """Time for the body of a request to arrive in full."""
    keep_alive_seconds: float = 75.0
    """Time a connection may stay open without a request; longer than clients' pools keep theirs."""
    max_sequences: int = 256
    """Prompts times choices of one request."""
    max_request_tokens: int = 1024 * 1024
    """Prompt tokens of one request, all its prompts together."""
    max_stored_bytes: int = 64 * 1024 * 1024
    """Memory for responses that later ones continue; 0: none is stored."""


@dataclass(frozen=True)
class ServerConfig:
    """Everything `minidsa serve` needs."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; the ready line names it."""
    served_model_name: str | None = None
    """The name in requests and answers; the name of the checkpoint's folder when not given."""
    chat_format: ChatFormatChoice = "auto"
    """How chats are encoded and answers read; auto: the checkpoint's template, or the one built in
    for its model type."""
    api_key: str | None = None
    """Asked of every route but health and version; no key is asked when not given."""
    api_key_file: str | None = None
    """A TOML file of more keys, each with limits of its own: see server/keys.py."""
    cors_origins: str = ""
    """Origins of web pages that may use the API from a browser, separated by commas; * for all."""
    allow_unknown_fields: bool = False
    """Drop fields of requests that are not known instead of refusing them by name."""
    sse_keep_alive_interval: float = 0.0
    """Silence of a stream, in seconds, after which a comment line is sent; 0: never."""
    otlp_traces_endpoint: str | None = None
    """Where spans of requests go, over OTLP/HTTP; needs the extra `otel`."""
    metrics_prefix: str = "minidsa"
    """What the names in /metrics begin with; `vllm` makes dashboards for vLLM work unchanged."""
    drain_seconds: float = 30.0
    """Time that open requests get to finish after SIGTERM."""
    heartbeat_seconds: float = 10.0
    """Silence of the engine after which the server is no longer ready."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
