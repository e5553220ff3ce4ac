"""What a running server says about itself: settings, model, choices. No secrets and no paths."""

import dataclasses
from typing import Any

import msgspec

from .service import Service


def describe(service: Service) -> dict[str, Any]:
    """The body of GET /server_info."""
    settings = dataclasses.asdict(service.config)
    # A collector's URL may hold a password.
    for name in ("api_key", "api_key_file", "otlp_traces_endpoint"):
        settings[name] = None if settings[name] is None else "set"
    settings["engine"].pop("model")
    for section, name in (
        (settings["engine"], "profile_dir"),
        (settings["engine"]["cache"], "session_dir"),
    ):
        section[name] = None if section[name] is None else "set"
    chat_format = service.chat_format
    return {
        "model": service.model_name,
        "engine": msgspec.to_builtins(service.info),
        "settings": settings,
        "chat_format": None if chat_format is None else chat_format.name,
        "sampling_defaults": dataclasses.asdict(service.defaults),
        "longest_request": service.max_tokens,
        "notes": [*service.notes, *service.info.notes],
    }
