"""Replaces every "choose for me" by a value, and says why in one sentence each.

Two turns: `resolve_run` before anything is loaded, `resolve_cache` once the weights are in memory
and it is known what a token costs. Both are pure: what they need to know comes as arguments.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from .engine import Dtype, EngineConfig
from .machine import Machine
from .quantities import shown_bytes
from .setting_error import SettingError

PAGE_SIZES = (("cpu", 16), ("cuda", 64))
TOKEN_BUDGETS = (("cpu", 512), ("cuda", 8192))
PREFILL_SHARE = 4
"""A step with decodes computes this many times fewer prompt tokens than one without."""
MOST_DRAFTS = 7
DRAFTS = (("mtp", 3), ("ngram", 4))
MAX_SECONDS = 86400
# Beyond this a cache on the CPU is only slower to start with: its cores cannot fill it in time.
MAX_CPU_CACHE_BYTES = 4 << 30


@dataclass(frozen=True)
class Resolved:
    """A config without open choices of its turn, and the choices that were made."""

    config: EngineConfig
    notes: tuple[str, ...]


def validate(config: EngineConfig) -> None:
    """Raise SettingError, naming field and value, for settings that no machine could serve."""
    scheduler, cache = config.scheduler, config.cache
    ranges = (
        ("max_num_seqs", scheduler.max_num_seqs, 1, 1 << 20),
        ("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1, 1 << 24),
        ("max_prefill_tokens", scheduler.max_prefill_tokens, 1, 1 << 24),
        ("max_queue", scheduler.max_queue, 1, 1 << 24),
        ("page_size", cache.page_size, 1, 1 << 16),
        ("num_pages", cache.num_pages, 1, None),
        ("host_bytes", cache.host_bytes, 0, None),
        ("max_model_len", config.max_model_len, 2, None),
        ("num_threads", config.num_threads, 1, 1 << 10),
        ("num_speculative_tokens", config.speculative.num_tokens, 1, MOST_DRAFTS),
    )
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= (most or value):
            above = "at least" if most is None else f"at most {most} and at least"
            raise SettingError(f"{name} is {value}; it must be {above} {least}")
    if cache.host_bytes and not cache.prefix_reuse:
        raise SettingError("host_bytes needs prefix_reuse: rows in host memory are found by prefix")
    if not 0 < cache.memory_fraction <= 1:
        raise SettingError(f"memory_fraction is {cache.memory_fraction}; it must be in (0, 1]")
    timeouts = (
        ("hang_timeout", config.hang_timeout),
        ("load_timeout", config.load_timeout),
        ("warm_up_timeout", config.warm_up_timeout),
        ("queue_timeout", scheduler.queue_timeout),
    )
    for name, seconds in timeouts:
        if seconds is not None and not 0 < seconds <= MAX_SECONDS:
            raise SettingError(f"{name} is {seconds:g}; it must be positive and at most a day")


def resolve_run(config: EngineConfig, machine: Machine, checkpoint_dtype: str) -> Resolved:
    """Choose device, number format, threads, page size and the token budget of a step.

    checkpoint_dtype: torch's name of the format most weights are stored in, such as "bfloat16".
    Raises SettingError for settings that contradict the machine or themselves.
    """
    validate(config)
    notes: list[str] = []
    config = _resolve_device(config, machine, checkpoint_dtype, notes)
    _check_rows(config)
    if config.cache.page_size is None:
        size = dict(PAGE_SIZES)[config.device]
        notes.append(f"page_size {size}: the usual size of a page on {config.device}")
        config = _with(config, "cache", page_size=size)
    return Resolved(_resolve_budget(config, notes), tuple(notes))


def resolve_drafts(config: EngineConfig, has_mtp: bool) -> Resolved:
    """Choose who drafts and how many tokens at most; has_mtp: the checkpoint holds an MTP layer.

    Raises SettingError where the layer is asked for and missing.
    """
    wish = config.speculative
    notes: list[str] = []
    if wish.method == "mtp" and not has_mtp:
        raise SettingError(
            "speculative method mtp needs an MTP layer, and the checkpoint holds none; "
            "take ngram, which needs no layer, or none"
        )
    method = wish.method
    if method == "auto":
        method = "mtp" if has_mtp else "none"
        reason = "the checkpoint has the layer" if has_mtp else "the checkpoint has no MTP layer"
        notes.append(f"speculative {method}: {reason}")
    count = wish.num_tokens or dict(DRAFTS).get(method, 0)
    chosen = dataclasses.replace(wish, method=method, num_tokens=count)
    if method != "none":
        fewer = ", fewer where they do not pay" if wish.adaptive else ""
        notes.append(f"num_speculative_tokens {count}: drafts a request and step{fewer}")
    return Resolved(dataclasses.replace(config, speculative=chosen), tuple(notes))


def resolve_cache(
    config: EngineConfig,
    context_length: int,
    bytes_per_token: int,
    free_bytes: int,
    step_bytes: int = 0,
) -> Resolved:
    """Choose the number of pages and the longest request, for a config from `resolve_run`.

    context_length: the most tokens the model was made for. bytes_per_token: a token's rows over all
    layers. free_bytes: memory of the device that is free once the weights are loaded. step_bytes:
    what a step needs of it.
    Raises SettingError for pages that do not fit and for more than the model's context; ValueError
    where the machine has no room for a single page.
    """
    notes: list[str] = []
    longest, page_size = config.max_model_len or context_length, config.cache.page_size
    if page_size is None:
        raise ValueError("page_size is open: resolve_run comes before resolve_cache")
    if longest > context_length:
        raise SettingError(f"max_model_len is {longest}; the model's context is {context_length}")
    num_pages, page_bytes = config.cache.num_pages, page_size * bytes_per_token
    # One page more than can be handed out is taken, and a step must have its own.
    room = free_bytes - step_bytes - page_bytes
    if num_pages is None:
        num_pages, note = _choose_pages(config, longest, page_bytes, free_bytes, room)
        notes.append(note)
        config = _with(config, "cache", num_pages=num_pages)
    elif num_pages * page_bytes > room:
        raise SettingError(
            f"num_pages is {num_pages}, which takes {shown_bytes(num_pages * page_bytes)} "
            f"(a page is {page_size} tokens of {bytes_per_token} bytes); beside a step "
            f"{shown_bytes(max(room, 0))} are free, so {max(room, 0) // page_bytes} pages would fit"
        )
    if num_pages * page_size < longest:
        notes.append(
            f"max_model_len {num_pages * page_size} instead of {longest}: "
            f"the cache of {num_pages} pages holds no longer request"
        )
        longest = num_pages * page_size
    return Resolved(dataclasses.replace(config, max_model_len=longest), tuple(notes))


def _resolve_device(
    config: EngineConfig, machine: Machine, checkpoint_dtype: str, notes: list[str]
) -> EngineConfig:
    device, dtype, threads = config.device, config.dtype, config.num_threads
    if device == "cuda" and not machine.has_cuda:
        raise SettingError("device is cuda, but no CUDA device is visible")
    if device == "auto":
        device = "cuda" if machine.has_cuda else "cpu"
        notes.append(
            "device cuda: a CUDA device is visible"
            if machine.has_cuda
            else "device cpu: no CUDA device is visible"
        )
    if dtype == "auto":
        dtype, note = _choose_dtype(device, checkpoint_dtype)
        notes.append(note)
    if threads is None:
        threads, note = _choose_threads(device, machine.num_cores)
        notes.append(note)
    return dataclasses.replace(config, device=device, dtype=dtype, num_threads=threads)


def _check_rows(config: EngineConfig) -> None:
    """Raise SettingError for rows in a format that this device and dtype do not keep."""
    rows = config.cache.row_dtype
    if rows == "fp8" and config.device != "cuda":
        raise SettingError(f"kv_cache_dtype fp8 needs device cuda; this one is {config.device}")
    if rows == "fp8" and config.dtype == "float32":
        raise SettingError("kv_cache_dtype fp8 needs dtype bfloat16 or float16, not float32")
    if rows == "bfloat16" and config.dtype != "bfloat16":
        raise SettingError(
            f"kv_cache_dtype is bfloat16 and dtype {config.dtype}: rows are kept in the format of "
            "the computation (auto) or in fp8"
        )


def _choose_dtype(device: str, checkpoint_dtype: str) -> tuple[Dtype, str]:
    if device == "cuda":
        return "bfloat16", "dtype bfloat16: the format GPUs compute this model family in"
    # Even with bf16 instructions: the same batch took a third of the time in fp32 on such a CPU,
    # and in bf16 the tokens of a request changed with its batch mates.
    reason = "on a CPU it is the faster one, and batch mates do not change a request's tokens"
    stored = "" if checkpoint_dtype == "float32" else f" (the checkpoint is {checkpoint_dtype})"
    return "float32", f"dtype float32: {reason}{stored}"


def _choose_threads(device: str, num_cores: int) -> tuple[int, str]:
    """Threads that wait for a core they do not get cost far more than they bring."""
    if device == "cuda":
        return 1, "num_threads 1: the work is on the GPU"
    threads = max(1, num_cores - 1)
    return threads, f"num_threads {threads}: {num_cores} cores, one of them for HTTP and text"


def _resolve_budget(config: EngineConfig, notes: list[str]) -> EngineConfig:
    seats, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if budget is None:
        usual = dict(TOKEN_BUDGETS)[config.device]
        budget = max(usual, seats)
        reason = (
            f"keeps a step short enough on {config.device}"
            if budget == usual
            else "a token for each of max_num_seqs requests"
        )
        notes.append(f"max_num_batched_tokens {budget}: {reason}")
    elif budget < seats:
        notes.append(
            f"max_num_seqs {budget} instead of {seats}: "
            "max_num_batched_tokens must hold a token of each running request"
        )
        seats = budget
    chunk = config.scheduler.max_prefill_tokens
    if chunk is None:
        chunk = max(1, budget // PREFILL_SHARE)
        notes.append(f"max_prefill_tokens {chunk}: beside decodes, so that none waits for long")
    return _with(
        config,
        "scheduler",
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_prefill_tokens=chunk,
    )


def _choose_pages(
    config: EngineConfig, longest: int, page_bytes: int, free_bytes: int, most: int
) -> tuple[int, str]:
    """Pages that are used at most, within the share of memory and within `most` bytes."""
    fraction, size = config.cache.memory_fraction, config.cache.page_size or 1
    room, bound = int(free_bytes * fraction), f"{fraction:g} of the free memory"
    if room > most:
        room, bound = max(most, 0), "what a step leaves of the free memory"
    if config.device == "cpu" and room > MAX_CPU_CACHE_BYTES:
        room, bound = MAX_CPU_CACHE_BYTES, f"{MAX_CPU_CACHE_BYTES >> 30} GiB, the most on a CPU"
    affordable = room // page_bytes
    if affordable < 1:
        raise ValueError(
            f"no page fits: {shown_bytes(page_bytes)} are needed, {bound} is {shown_bytes(room)}; "
            "free memory, or set num_pages"
        )
    seats = config.scheduler.max_num_seqs
    wanted = seats * -(-longest // size)
    if wanted <= affordable:
        return wanted, f"num_pages {wanted}: {seats} requests of {longest} tokens each"
    return affordable, f"num_pages {affordable}: they fill {bound}"


def _with(config: EngineConfig, section: str, **values: Any) -> EngineConfig:
    """A config with some values of one section replaced."""
    old = config.scheduler if section == "scheduler" else config.cache
    return dataclasses.replace(config, **{section: dataclasses.replace(old, **values)})
