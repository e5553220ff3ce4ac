"""`minidsa chat`: a conversation in the terminal with a running server.

Thoughts are shown dimmed where the terminal can, Ctrl-C stops an answer, and Ctrl-D leaves.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .http_client import CallFailed, ServerAddress

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = "Ctrl-C stops an answer, Ctrl-D leaves, /new starts over"


@dataclass(frozen=True)
class Terminal:
    """Where answers are written; `dims`: it understands colours."""

    write: Callable[[str], None]
    dims: bool = False


def chat(
    address: ServerAddress,
    fields: dict[str, Any],
    system: str | None,
    lines: Iterable[str],
    terminal: Terminal,
) -> int:
    """Answer each line until there are no more; returns the exit code. Raises CallFailed at first.

    fields: what every request carries beside its messages.
    """
    write = terminal.write
    opening = [] if system is None else [{"role": "system", "content": system}]
    model = address.get("/v1/models")["data"][0]["id"]
    write(f"{model} at {address.url}. {_HELP}\n")
    messages: list[dict[str, str]] = []
    for line in lines:
        if line.strip() == "/new":
            messages.clear()
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        answer = _Answer(terminal)
        try:
            body = fields | {"messages": [*opening, *messages], "stream": True}
            body["stream_options"] = {"include_usage": True}
            answer.show(address.stream("/v1/chat/completions", body))
        except KeyboardInterrupt:
            write("\n(stopped)\n")
        except CallFailed as error:
            write(f"\nerror: {error}\n")
        # A turn that was never answered is forgotten, so that the next one can be.
        if answer.text:
            messages.append({"role": "assistant", "content": answer.text})
        else:
            messages.pop()
    return 0


class _Answer:
    """One answer on its way to the terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self.text = ""
        self._write = terminal.write
        self._dims = terminal.dims
        self._is_thinking = False

    def show(self, events: Iterator[dict[str, Any]]) -> None:
        start = time.monotonic()
        for event in events:
            for choice in event["choices"]:
                self._add(choice["delta"])
            if event.get("usage"):
                self._close(event["usage"], time.monotonic() - start)

    def _add(self, delta: dict[str, Any]) -> None:
        thought, text = delta.get("reasoning_content"), delta.get("content")
        if thought:
            self._think(True)
            self._write(_printable(thought))
        if text:
            self._think(False)
            self.text += text
            self._write(_printable(text))

    def _think(self, thinks: bool) -> None:
        if thinks != self._is_thinking:
            self._is_thinking = thinks
            mark = _DIM if thinks else _PLAIN
            self._write((mark if self._dims else "") + ("" if thinks else "\n"))

    def _close(self, usage: dict[str, Any], seconds: float) -> None:
        self._think(False)
        tokens = usage["completion_tokens"]
        counts = f"{usage['prompt_tokens']} + {tokens} tokens, {tokens / seconds:.1f} tokens/s"
        self._write(f"\n{_DIM}{counts}{_PLAIN}\n" if self._dims else f"\n({counts})\n")


def _printable(text: str) -> str:
    """Without what would steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c < "\xa0"))
