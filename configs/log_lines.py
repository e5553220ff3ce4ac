"""How a line of the log is written: for people, or as one JSON object a line.

Both processes of a server write to stderr alike. No line holds a prompt, an answer or a key.
"""

import json
import logging
import time
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """A record as an object; what a caller passes as `extra={"fields": {...}}` stands beside it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(record.__dict__.get("fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        level, message = record.levelname.lower(), record.getMessage()
        return json_line(self._process, level, message, record.created, fields)


def json_line(
    process: str, level: str, message: str, when: float, fields: dict[str, Any] | None = None
) -> str:
    """One line, without its end. `when`: seconds since 1970, written in UTC."""
    whole, part = divmod(when, 1)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int(part * 1000):03}Z"
    line = {"time": stamp, "level": level, "process": process, "message": message}
    return json.dumps(line | (fields or {}), ensure_ascii=False, default=str)


def set_up_logging(log_format: LogFormat, process: str) -> None:
    """Write the log of this process to stderr in this form."""
    name = "" if process == "server" else f"{process}: "
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines(process)
        if log_format == "json"
        else logging.Formatter(f"%(levelname)s: {name}%(message)s")
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    # A log that cannot be written must not disturb the serving.
    logging.raiseExceptions = False
