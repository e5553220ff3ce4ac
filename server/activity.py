"""A line every ten seconds while the server is busy; silent when idle. Counts only, no prompts."""

import asyncio
from collections.abc import Callable

from ..scheduler.messages import EngineStats

INTERVAL = 10.0


async def report_activity(
    stats: Callable[[], EngineStats], say: Callable[[str], None], interval: float = INTERVAL
) -> None:
    """Runs until it is cancelled."""
    before = stats()
    while True:
        await asyncio.sleep(interval)
        now = stats()
        line = activity_line(before, now, interval)
        if line is not None:
            say(line)
        before = now


def activity_line(before: EngineStats, now: EngineStats, seconds: float) -> str | None:
    """What was done between two counts; None where nothing was."""
    prompt = now.num_prompt_tokens - before.num_prompt_tokens
    output = now.num_generation_tokens - before.num_generation_tokens
    if not (prompt or output or now.num_running or now.num_waiting):
        return None
    used = (now.num_pages - now.num_free_pages) / (now.num_pages or 1)
    preempted = now.num_preemptions - before.num_preemptions
    line = (
        f"{prompt / seconds:.0f} prompt and {output / seconds:.0f} output tokens/s; "
        f"{now.num_running} running, {now.num_waiting} waiting; cache {used:.0%} used"
    )
    if queries := now.num_prefix_queries - before.num_prefix_queries:
        hits = now.num_prefix_hits - before.num_prefix_hits
        line += f", {hits / queries:.0%} of prompts found"
    if (accepted := _accepted(before, now)) is not None:
        line += f"; {accepted:.0%} of drafts accepted"
    return f"{line}; {preempted} preempted" if preempted else line


def _accepted(before: EngineStats, now: EngineStats) -> float | None:
    """Share of the drafts that were accepted between two counts; None where there were none."""
    if now.drafts is None or before.drafts is None:
        return None
    drafted = now.drafts.num_draft_tokens - before.drafts.num_draft_tokens
    accepted = now.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens
    return accepted / drafted if drafted else None
