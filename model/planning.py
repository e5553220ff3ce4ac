"""A memory plan from a configuration alone, for this machine or for a GPU that is not here."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ..configs.engine import EngineConfig
from ..configs.gpus import find_gpu
from ..configs.machine import detect
from ..configs.resolve import resolve_drafts, resolve_run
from .checkpoint import read_config
from .memory_plan import DoesNotFit, MemoryPlan, plan_memory


def plan_lines(config: EngineConfig, gpu: str | None, ranks: int) -> list[str]:
    """The plan for `config.model`, a folder with a config.json, as lines for people.

    gpu: a name of `configs.gpus`; None: the main memory of this machine. Raises SettingError, and
    ValueError for a configuration that cannot be served or does not fit.
    """
    machine = detect(has_cuda=gpu is not None)
    free_bytes = machine.free_bytes if gpu is None else find_gpu(gpu).free_bytes
    model = read_config(Path(config.model))
    device = "cpu" if gpu is None else "cuda"
    run = resolve_run(
        dataclasses.replace(config, device=device), machine, model.dtype or "bfloat16"
    )
    drafts = resolve_drafts(run.config, model.num_mtp_layers > 0)
    with_mtp = drafts.config.speculative.method == "mtp"

    keeps_fp8 = (
        model.quantised
        and gpu is not None
        and find_gpu(gpu).has_fp8
        and run.config.dtype != "float32"
    )

    def plan(count: int) -> MemoryPlan:
        return plan_memory(
            model,
            drafts.config,
            free_bytes,
            with_mtp=with_mtp,
            keeps_fp8=keeps_fp8,
            ranks=count,
            gpu=None if gpu is None else find_gpu(gpu).name,
        )

    try:
        planned = plan(ranks)
    except DoesNotFit as error:
        hint = ""
        if gpu is not None and (count := _fitting_count(plan, ranks, model.num_heads)):
            hint = (
                f"; {count} of them would hold it (plan with --tp {count}; "
                "one server uses one device so far)"
            )
        raise DoesNotFit(f"{error}{hint}") from None
    notes = (*run.notes, *drafts.notes, *planned.notes)
    return [*planned.lines(), *(f"  {note}" for note in notes)]


def _fitting_count(plan: Callable[[int], MemoryPlan], above: int, most: int) -> int | None:
    """The smallest number of devices above `above` that share `most` heads and hold the model."""
    for count in (n for n in range(above + 1, most + 1) if most % n == 0):
        try:
            plan(count)
        except DoesNotFit:
            continue
        return count
    return None
