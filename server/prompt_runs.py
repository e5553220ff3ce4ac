"""A prompt as runs: control tokens by name, and text that can never become one.

A stock tokenizer turns `<｜User｜>` typed by a user into the real role token. So prompts are not
strings here but lists of runs: a `Control` is looked up by name, a string is encoded as plain text
whatever it spells. Runs are cut at control tokens only: punctuation and the newlines after it merge
into one token, so cutting template text from user text would give other ids than the whole string.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Control(NamedTuple):
    """One control token, by the literal it has in the tokenizer's files."""

    literal: str


Run = Control | str


class RunWriter:
    """Collects runs in order, joining neighbouring texts."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._texts: list[str] = []

    def write(self, *parts: Run) -> None:
        """Append texts and control tokens."""
        for part in parts:
            if isinstance(part, Control):
                self._close_text()
                self._runs.append(part)
            elif part:
                self._texts.append(part)

    def runs(self) -> list[Run]:
        """All that was written; no two texts stand side by side and none is empty."""
        self._close_text()
        return list(self._runs)

    def _close_text(self) -> None:
        if self._texts:
            self._runs.append("".join(self._texts))
            self._texts = []


def join_runs(runs: Iterable[Run]) -> list[Run]:
    """The same prompt with neighbouring texts joined and empty ones dropped."""
    writer = RunWriter()
    writer.write(*runs)
    return writer.runs()


def prompt_text(runs: Sequence[Run]) -> str:
    """The prompt as one string, as people read it and as the published fixtures store it."""
    return "".join(run.literal if isinstance(run, Control) else run for run in runs)
