"""How long each stage of a start took, for the operator who waits for it."""

import time


class StartStages:
    """A clock that runs from its making; `end` is called behind each stage."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._parts: list[str] = []

    def end(self, stage: str) -> None:
        now = time.monotonic()
        self._parts.append(f"{stage} {now - self._last:.1f} s")
        self._last = now

    def line(self) -> str:
        return f"started in {self._last - self._began:.1f} s: {', '.join(self._parts)}"
