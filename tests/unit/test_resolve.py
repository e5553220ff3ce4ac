"""Automatic choices: each follows from the machine, is explained, and yields to what was said."""

import dataclasses

import pytest

from minidsa.configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from minidsa.configs.machine import Machine, detect
from minidsa.configs.resolve import MAX_CPU_CACHE_BYTES, resolve_cache, resolve_run, validate
from minidsa.configs.setting_error import SettingError

CPU = Machine(has_cuda=False, num_cores=3, free_bytes=1 << 30)
GPU = dataclasses.replace(CPU, has_cuda=True)


def config(**values):
    scheduler = {k: v for k, v in values.items() if k in SchedulerConfig.__dataclass_fields__}
    cache = {k: v for k, v in values.items() if k in CacheConfig.__dataclass_fields__}
    rest = {k: v for k, v in values.items() if k not in scheduler | cache}
    return EngineConfig(scheduler=SchedulerConfig(**scheduler), cache=CacheConfig(**cache), **rest)


@pytest.mark.parametrize(
    ("machine", "device", "dtype", "page", "budget", "threads"),
    [
        (CPU, "cpu", "float32", 16, 512, 2),
        (GPU, "cuda", "bfloat16", 64, 8192, 1),
    ],
)
def test_every_open_choice_is_made_and_explained(machine, device, dtype, page, budget, threads):
    resolved = resolve_run(EngineConfig(), machine, "bfloat16")
    chosen = resolved.config
    assert (chosen.device, chosen.dtype, chosen.num_threads) == (device, dtype, threads)
    assert chosen.cache.page_size == page
    assert chosen.scheduler.max_num_batched_tokens == budget
    for name in ("device", "dtype", "num_threads", "page_size", "max_num_batched_tokens"):
        (note,) = [note for note in resolved.notes if note.startswith(name + " ")]
        assert ": " in note and "\n" not in note


def test_what_was_said_is_kept_without_a_note():
    said = config(device="cpu", dtype="float16", num_threads=7, page_size=5)
    said = dataclasses.replace(
        said, scheduler=SchedulerConfig(9, max_num_batched_tokens=9, max_prefill_tokens=3)
    )
    resolved = resolve_run(said, GPU, "bfloat16")
    assert resolved.config == said and resolved.notes == ()


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_cpu_computes_in_fp32_and_says_what_was_stored(stored):
    resolved = resolve_run(EngineConfig(), CPU, stored)
    (note,) = [note for note in resolved.notes if note.startswith("dtype ")]
    assert resolved.config.dtype == "float32"
    assert ("the checkpoint is bfloat16" in note) is (stored == "bfloat16")


@pytest.mark.parametrize(
    ("machine", "values", "message"),
    [
        (CPU, {"row_dtype": "fp8"}, "kv_cache_dtype fp8 needs device cuda; this one is cpu"),
        (GPU, {"row_dtype": "fp8", "dtype": "float32"}, "fp8 needs dtype bfloat16 or float16"),
        (GPU, {"row_dtype": "bfloat16", "dtype": "float16"}, "bfloat16 and dtype float16"),
        (CPU, {"row_dtype": "bfloat16"}, "bfloat16 and dtype float32"),
    ],
)
def test_rows_in_a_format_that_is_not_kept_are_refused(machine, values, message):
    with pytest.raises(SettingError, match=message):
        resolve_run(config(**values), machine, "bfloat16")


def test_every_running_request_has_a_token_in_the_budget():
    resolved = resolve_run(config(max_num_seqs=64, max_num_batched_tokens=10), CPU, "float32")
    assert resolved.config.scheduler.max_num_seqs == 10
    assert any(note.startswith("max_num_seqs 10 instead of 64") for note in resolved.notes)
    resolved = resolve_run(config(max_num_seqs=1000), CPU, "float32")
    assert resolved.config.scheduler.max_num_batched_tokens == 1000


@pytest.mark.parametrize(
    "field",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_queue",
        "page_size",
        "num_pages",
        "max_model_len",
        "num_threads",
        "memory_fraction",
        "hang_timeout",
        "load_timeout",
        "warm_up_timeout",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 10**15, float("nan")])
def test_impossible_settings_are_refused_by_name(field, value):
    is_fraction = field.endswith(("fraction", "timeout"))
    bounded_later = field in {"num_pages", "max_model_len"}
    if (value != value and not is_fraction) or (value > 0 and bounded_later):
        value = 0
    with pytest.raises(ValueError, match=rf"^{field} is "):
        validate(config(**{field: value}))


def test_a_host_tier_is_bounded_below_and_needs_prefixes():
    with pytest.raises(ValueError, match=r"^host_bytes is -1"):
        validate(config(host_bytes=-1))
    cache = CacheConfig(prefix_reuse=False, host_bytes=1 << 20)
    with pytest.raises(ValueError, match="host_bytes needs prefix_reuse"):
        validate(dataclasses.replace(config(), cache=cache))


def test_cuda_without_a_device_is_refused():
    with pytest.raises(ValueError, match="no CUDA device"):
        resolve_run(config(device="cuda"), CPU, "float32")


def resolved_cache(settings, context=128, token=8, free=1 << 30, machine=CPU):
    run = resolve_run(settings, machine, "float32").config
    return resolve_cache(run, context, token, free)


def test_the_pool_holds_what_the_seats_can_use():
    resolved = resolved_cache(config(max_num_seqs=4, page_size=10))
    assert resolved.config.cache.num_pages == 4 * 13
    assert resolved.config.max_model_len == 128
    assert resolved.notes == ("num_pages 52: 4 requests of 128 tokens each",)


def test_the_pool_takes_its_share_of_free_memory_and_no_more():
    resolved = resolved_cache(config(page_size=10, memory_fraction=0.25), free=80 * 30)
    assert resolved.config.cache.num_pages == 7
    assert resolved.config.max_model_len == 70  # what the pool can hold is said before it is asked
    assert "instead of 128" in resolved.notes[1]


@pytest.mark.parametrize(("machine", "bounded"), [(CPU, True), (GPU, False)])
def test_only_a_cpu_cache_has_an_absolute_bound(machine, bounded):
    resolved = resolved_cache(
        config(), context=1 << 20, token=1 << 10, free=1 << 40, machine=machine
    )
    cache = resolved.config.cache
    bytes_taken = (cache.num_pages or 0) * (cache.page_size or 0) << 10
    assert (bytes_taken <= MAX_CPU_CACHE_BYTES) is bounded


def test_a_pool_that_was_said_is_kept_and_bounds_the_requests():
    resolved = resolved_cache(config(num_pages=7, page_size=16, max_model_len=128))
    assert resolved.config.cache.num_pages == 7
    assert resolved.config.max_model_len == 112


def test_pages_that_do_not_fit_are_refused_with_what_would():
    """Whatever an allocator would make of it: the numbers are compared before it is asked."""
    settings = config(page_size=16, num_pages=10**9)
    message = (
        "num_pages is 1000000000, which takes 954 GiB (a page is 16 tokens of 64 bytes); "
        "beside a step 1 GiB are free, so 1048575 pages would fit"
    )
    with pytest.raises(SettingError) as caught:
        resolved_cache(settings, token=64, free=1 << 30)
    assert str(caught.value) == message
    assert resolved_cache(config(page_size=16, num_pages=1 << 20), token=64, free=(1 << 30) + 1024)


def test_no_memory_for_one_page_is_one_line_with_the_numbers():
    with pytest.raises(ValueError, match=r"no page fits: 128 bytes are needed, .* is 125 bytes"):
        resolved_cache(config(page_size=16, memory_fraction=0.25), free=500)


def test_more_than_the_context_of_the_model_is_refused():
    with pytest.raises(ValueError, match="max_model_len is 129; the model's context is 128"):
        resolved_cache(config(max_model_len=129))
    assert resolved_cache(config(max_model_len=100)).config.max_model_len == 100


def test_this_machine_is_seen():
    machine = detect(has_cuda=False)
    assert machine.num_cores >= 1 and machine.free_bytes > 0


def test_a_container_sees_its_own_limits(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 999 kB\nMemAvailable: 64 kB\n",
        "sys/fs/cgroup/memory.max": "50000\n",
        "sys/fs/cgroup/memory.current": "20000\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert detect(False, tmp_path) == Machine(False, 1, 30000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert detect(False, tmp_path).free_bytes == 65536
    assert detect(False, tmp_path / "nowhere").free_bytes > 0
