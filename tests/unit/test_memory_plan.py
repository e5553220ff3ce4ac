"""What a start will take, against numbers worked out by hand and against what is allocated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import T_CPU, T_WIDE, t_cpu
from minidsa.attention.workspace import EXPANDED_BYTES, SCORES_BYTES
from minidsa.configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from minidsa.configs.gpus import find_gpu
from minidsa.configs.machine import Machine
from minidsa.configs.resolve import resolve_run
from minidsa.configs.setting_error import SettingError
from minidsa.model.config import parse_config
from minidsa.model.config_defaults import DEFAULTS
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.keys import ConfigError
from minidsa.model.layers.fp8 import Fp8Linear
from minidsa.model.layers.products import LONGEST_CHAIN
from minidsa.model.loading import check_start
from minidsa.model.memory_plan import DoesNotFit, plan_memory
from minidsa.model.names import name_table
from minidsa.model.planning import plan_lines
from minidsa.model.weight_sizes import NARROW_UP_TO, packed_copies, total, weight_sizes
from public_configs import DEEPSEEK_V3, DEEPSEEK_V32, MOONLIGHT

GIB = 1 << 30
GPU = Machine(has_cuda=True, num_cores=8, free_bytes=0)
TABLES = 2 * 129280 * 7168 + 7168
# q_a, q_b, kv_a, kv_b and o, with the norms of both latents and of the layer.
ATTENTION = (
    7168 * 1536 + 1536 + 1536 * 128 * 192
    + 7168 * 576 + 512 + 512 * 128 * 256
    + 128 * 128 * 7168 + 2 * 7168
)  # fmt: skip
EXPERTS = 257 * 3 * 7168 * 2048 + 256 * 7168 + 256
V3 = TABLES + 61 * ATTENTION + 3 * 3 * 7168 * 18432 + 58 * EXPERTS
# wq_b, wk, the key norm, the head weights.
INDEXER = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 64 * 7168
MTP = ATTENTION + EXPERTS + 2 * 7168 * 7168 + 3 * 7168
MOONLIGHT_ATTENTION = (
    2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048 + 2 * 2048
)
MOONLIGHT_SIZE = (
    2 * 163840 * 2048 + 2048 + 27 * MOONLIGHT_ATTENTION + 3 * 2048 * 11264
    + 26 * (66 * 3 * 2048 * 1408 + 64 * 2048 + 64)
)  # fmt: skip


def plan(raw: Any, free_bytes: int, ranks: int = 1, **settings: Any):
    run = resolve_run(EngineConfig(**settings), GPU, "bfloat16").config
    return plan_memory(parse_config(raw), run, free_bytes, ranks=ranks)


@pytest.mark.parametrize(
    ("raw", "size", "card"),
    [
        (DEEPSEEK_V3, V3, 671e9),
        (DEEPSEEK_V32, V3 + 61 * INDEXER, 671.9e9),
        (MOONLIGHT, MOONLIGHT_SIZE, 15.96e9),
    ],
    ids=["V3", "V3.2", "Moonlight"],
)
def test_parameters_of_published_models(raw, size, card):
    found = total(weight_sizes(parse_config(raw), with_mtp=False)).parameters
    assert found == size == pytest.approx(card, rel=1e-3)


def test_the_mtp_layer_is_counted_apart():
    sizes = weight_sizes(parse_config(DEEPSEEK_V3), with_mtp=True)
    assert sizes["MTP layer"].parameters == MTP
    assert total(sizes).parameters == V3 + MTP


VARIANTS = {
    "v32": T_CPU,
    "fp8": T_WIDE,
    "dense alone": dict(T_CPU) | {"first_k_dense_replace": 4},
    "no shared experts": dict(T_CPU) | {"n_shared_experts": 0},
    "v3, tied, no q-lora": dict(T_CPU)
    | {"model_type": "deepseek_v3", "q_lora_rank": None, "tie_word_embeddings": True},
    "fp8, no q-lora": dict(T_WIDE) | {"model_type": "deepseek_v3", "q_lora_rank": None},
    "fp8, half-split": dict(T_WIDE) | {"model_type": "deepseek_v3", "rope_interleave": False},
    "fp8, two blocks of an index key": dict(T_WIDE) | {"index_head_dim": 256},
    "fp8, a query latent of half a block": dict(T_WIDE) | {"q_lora_rank": 192},
}


@pytest.mark.parametrize("with_mtp", [False, True], ids=["", "mtp"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_that_are_allocated(variant, dtype, with_mtp):
    config = parse_config(VARIANTS[variant])
    model = DeepseekModel(config, dtype, torch.device("meta"), with_mtp=with_mtp)
    weights = [entry.target for entry in name_table(model).values()]
    size = total(weight_sizes(config, with_mtp=with_mtp))
    assert size.parameters == sum(weight.numel() for weight in weights)
    assert size.nbytes(dtype.itemsize) == sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_that_stay_in_fp8_are_counted_with_their_scales(variant):
    config = parse_config(VARIANTS[variant])
    model = DeepseekModel(
        config, torch.bfloat16, torch.device("meta"), with_mtp=True, keeps_fp8=True
    )
    entries = name_table(model).values()
    bytes_of_all = sum(entry.target.nbytes for entry in entries)
    scales = [entry.scales for entry in entries if entry.scales is not None]
    bytes_of_all += sum(scale.numel() * 4 for scale in scales)
    kept = [linear.weight_ED for linear in model._linears if isinstance(linear, Fp8Linear)]
    bytes_of_all += sum(-len(weight_ED) % 128 * weight_ED.shape[1] for weight_ED in kept)
    size = total(weight_sizes(config, with_mtp=True))
    assert size.nbytes(2, keeps_fp8=True) == bytes_of_all


def test_published_fp8_weights_fit_where_their_bytes_do():
    """DeepSeek-V3.2 is 671.9e9 parameters in a checkpoint of 690 GB."""
    size = total(weight_sizes(parse_config(DEEPSEEK_V32), with_mtp=False))
    assert 676e9 < size.nbytes(2, keeps_fp8=True) < 690e9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_planned_is_what_a_start_takes(dtype):
    config = EngineConfig(model=str(t_cpu()), device="cpu", dtype=dtype)
    start = check_start(config)
    loaded = start.load()
    storage = loaded.runner.storage
    rows = [storage.latent_LSC, *(keys for keys in storage.index_k if keys is not None)]
    assert start.memory.num_tokens == loaded.info.num_cache_tokens
    assert start.memory.cache_bytes == sum(row.nbytes for row in rows)
    assert start.memory.num_parameters == loaded.info.num_parameters
    copies = start.memory.weights.get("packed once more", 0)
    assert (copies > 0) is (dtype == "float32")
    rope_table = loaded.runner.model.angles_PR.nbytes
    assert start.memory.weight_bytes == loaded.info.weight_bytes + rope_table + copies


KINDS = {"deepseek_v3": DEEPSEEK_V3, "deepseek_v32": DEEPSEEK_V32, "kimi_k2": DEEPSEEK_V3}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_conf_09_every_architecture_caches_latents_and_says_how_many_bytes(kind):
    """Never the expanded keys and values: those would be 128 x (192 + 128) x 2 bytes a layer."""
    planned = plan(dict(KINDS[kind]) | {"model_type": kind}, 200 * GIB, ranks=16)
    index = 61 * 128 * 2 if kind == "deepseek_v32" else 0
    assert planned.latent_bytes_per_token == 61 * (512 + 64) * 2
    assert planned.index_bytes_per_token == index
    words = f"a token takes 70272 bytes of latent rows and {index} bytes of index rows"
    assert any(words in line for line in planned.lines())


def test_rows_in_fp8_take_the_bytes_of_their_layout():
    """656 bytes of a latent row, 132 of an index key: 48068 a token in 61 layers."""
    planned = plan(DEEPSEEK_V32, 200 * GIB, ranks=16, cache=CacheConfig(row_dtype="fp8"))
    assert planned.latent_bytes_per_token == 61 * 656
    assert planned.index_bytes_per_token == 61 * 132
    narrow = dict(DEEPSEEK_V32) | {"kv_lora_rank": 192 + 2}
    with pytest.raises(SettingError, match=r"kv_cache_dtype is fp8.*has 194 and 128"):
        plan(narrow, 200 * GIB, ranks=16, cache=CacheConfig(row_dtype="fp8"))


def test_a_gpu_has_room_for_expanded_keys_and_index_scores():
    """The caps of both, whatever the step: scores only where a model selects."""
    sparse, dense = plan(DEEPSEEK_V32, 200 * GIB, ranks=16), plan(MOONLIGHT, 200 * GIB)
    assert sparse.workspace - dense.workspace == SCORES_BYTES
    assert dense.workspace > EXPANDED_BYTES


def test_conf_09_an_unknown_architecture_is_refused():
    for kind in ("glm4_moe_lite", "llama", "deepseek_v2", None):
        with pytest.raises(ConfigError, match="model_type"):
            parse_config(dict(DEEPSEEK_V3) | {"model_type": kind})


def test_ops_12_a_plan_adds_up_and_leaves_room_for_a_step():
    planned = plan(MOONLIGHT, find_gpu("H200").free_bytes)
    step = planned.activations + planned.workspace + planned.logits + planned.graphs
    assert planned.total_bytes == planned.weight_bytes + planned.cache_bytes + step
    assert planned.total_bytes < planned.free_bytes
    # 64 requests of 8192 tokens fit in half of what is left.
    assert planned.num_tokens == 64 * 8192 and planned.config.max_model_len == 8192
    assert planned.weights["embedding and head"] == 2 * (2 * 163840 * 2048 + 2048)
    text = "\n".join(planned.lines())
    for words in ("16B parameters", "longest request 8192 tokens", "64 of that length", "logits"):
        assert words in text


def test_graphs_take_memory_where_steps_are_replayed():
    free = find_gpu("H200").free_bytes
    planned, eager = plan(MOONLIGHT, free), plan(MOONLIGHT, free, enforce_eager=True)
    assert eager.graphs == 0
    # The pool holds a step of 64 requests with its logits, and each graph its own tensors.
    assert planned.graphs > 64 * 163840 * 2
    assert planned.step_bytes - eager.step_bytes == planned.graphs
    many = plan(MOONLIGHT, free, scheduler=SchedulerConfig(max_num_seqs=2048))
    most = plan(MOONLIGHT, free, scheduler=SchedulerConfig(max_num_seqs=256))
    assert many.graphs == most.graphs > planned.graphs


def test_a_full_cache_leaves_a_step_its_memory():
    settings = {"cache": CacheConfig(memory_fraction=1.0), "max_model_len": 8192}
    planned = plan(MOONLIGHT, 40 * GIB, **settings)
    assert 0.99 * planned.free_bytes < planned.total_bytes <= planned.free_bytes
    assert "a step leaves" in planned.notes[0]


def test_ops_12_a_model_that_does_not_fit_is_refused_with_the_numbers():
    free = find_gpu("h200").free_bytes
    with pytest.raises(DoesNotFit) as caught:
        plan(DEEPSEEK_V32, free)
    message = str(caught.value)
    for words in (
        "weights take 1.22 TiB in bfloat16",
        "8192 tokens",
        "more than the 140 GiB free on cuda;",
        "1.23 TiB",
    ):
        assert words in message
    shared = plan(DEEPSEEK_V32, free, ranks=16)
    assert shared.weight_bytes < free
    assert shared.lines()[0].endswith(" free on cuda, each of 16 devices")


def test_a_step_that_is_too_large_is_a_setting_and_told_what_would_fit():
    def plan_steps_of(tokens: int):
        plan(MOONLIGHT, 40 * GIB, scheduler=SchedulerConfig(max_num_batched_tokens=tokens))

    with pytest.raises(SettingError, match=r"max_num_batched_tokens of about ([0-9]+)") as caught:
        plan_steps_of(1 << 24)
    fitting = int(str(caught.value).rpartition(" ")[2])
    plan_steps_of(int(0.95 * fitting))
    with pytest.raises(SettingError):
        plan_steps_of(int(1.1 * fitting))


def test_pages_beyond_the_memory_are_refused_before_anything_is_loaded():
    config = EngineConfig(model=str(t_cpu()), cache=CacheConfig(num_pages=10**12))
    with pytest.raises(SettingError, match=r"num_pages is 1000000000000, .* pages would fit"):
        check_start(config)


def test_devices_that_cannot_share_the_heads_are_told_which_can():
    for ranks in (0, 3, 24):
        with pytest.raises(SettingError, match=f"^{ranks} devices .*: 1, 2, 4, 8, 16$"):
            plan(MOONLIGHT, 140 * GIB, ranks)


def folder(tmp_path: Path, raw: Any) -> EngineConfig:
    (tmp_path / "config.json").write_text(json.dumps(dict(raw)))
    return EngineConfig(model=str(tmp_path))


def test_a_plan_needs_a_config_alone_and_names_how_many_devices_would_do(tmp_path):
    config = folder(tmp_path, DEEPSEEK_V32)
    with pytest.raises(
        DoesNotFit,
        match=r"641 GiB in bfloat16, products in fp8.* the 140 GiB that CUDA leaves on one h200; "
        r".* 8 of them would hold it .plan with --tp 8;",
    ):
        plan_lines(config, "h200", 1)
    lines = plan_lines(config, "h200", 8)
    # Nobody looked at these devices, so nothing is said to be free.
    assert lines[0].endswith(" of 140 GiB that CUDA leaves on each of 8 h200")
    assert any("684B parameters" in line and "MTP layer" in line for line in lines)
    with pytest.raises(SettingError, match="h300 is not known; there are: b200, h200"):
        plan_lines(config, "h300", 1)


def test_products_are_kept_twice_where_a_cpu_keeps_them():
    assert NARROW_UP_TO == LONGEST_CHAIN
    narrow, wide = dict(T_CPU), dict(T_CPU) | {"hidden_size": 1024}
    assert packed_copies(parse_config(narrow), with_mtp=False).parameters > 0
    assert packed_copies(parse_config(wide), with_mtp=False).parameters == 0
    tied = parse_config(wide | {"tie_word_embeddings": True})
    assert packed_copies(tied, with_mtp=False).parameters == 512 * 1024
