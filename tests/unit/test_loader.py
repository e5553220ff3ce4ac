"""Weights: every tensor in its place, and names, shapes, dtypes, values that must be exact."""

import io
import logging
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from checkpoint_edits import check, edit, edit_json, load, refused
from minidsa.model import loader, progress
from minidsa.model.checkpoint import INDEX, SINGLE, CheckpointError, read_config
from minidsa.model.config import parse_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.loader import check_checkpoint, load_weights
from minidsa.model.make_checkpoint import PRESETS, write_random_checkpoint
from minidsa.model.names import name_table, needed_shapes
from minidsa.model.upload import Uploader

EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def test_every_tensor_lands_in_its_place(single):
    model = load(single)
    tensors = load_file(single / SINGLE)
    attention = model.layers[1].attention
    prefix = "model.layers.1.self_attn."
    assert attention.indexer is not None
    assert torch.equal(attention.down.weight_ED[:24], tensors[f"{prefix}q_a_proj.weight"])
    assert torch.equal(attention.down.weight_ED[40:], tensors[f"{prefix}kv_a_proj_with_mqa.weight"])
    # The indexer's first 8 rows are half-split pairs in the file and adjacent pairs here.
    rows = [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)]
    assert torch.equal(attention.down.weight_ED[24:40], tensors[f"{prefix}indexer.wk.weight"][rows])
    queries = tensors[f"{prefix}indexer.wq_b.weight"].view(4, 16, 24)[:, rows]
    assert torch.equal(attention.indexer.up.weight_ED.view(4, 16, 24), queries)
    for name, weight in (("weight", "weight_D"), ("bias", "bias_D")):
        norm = tensors[f"{prefix}indexer.k_norm.{name}"][rows]
        assert torch.equal(vars(attention.indexer.key_norm)[weight], norm)
    kv_b = tensors[f"{prefix}kv_b_proj.weight"].view(4, 32, 32)
    assert torch.equal(attention.layer.w_uk_HNC, kv_b[:, :16])
    assert torch.equal(attention.layer.w_uv_HVC, kv_b[:, 16:])


def test_no_element_stays_uninitialised(single, monkeypatch):
    """Allocate weights as NaN: after loading none is left."""
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: real_empty(*a, **k).fill_(torch.nan))
    model = load(single)
    weights = [entry.target for entry in name_table(model).values()]
    layers = [model.layers[i] for i in range(4)]
    weights += [
        w
        for layer in layers
        for w in (layer.attention.down.weight_ED, layer.attention.out.weight_ED)
    ]
    assert all(weight.isfinite().all() for weight in weights)
    rows = model.layers[1].feed_forward
    assert all(w.isfinite().all() for w in vars(rows).values() if isinstance(w, torch.Tensor))


def test_weights_for_a_gpu_are_those_of_a_cpu(single, monkeypatch):
    """Through threads and pieces, with whatever has to be turned or reordered on the way."""
    plain = name_table(load(single))
    monkeypatch.setattr(loader, "_uploader", lambda device: Uploader(device, piece_bytes=100))
    moved = name_table(load(single))
    assert all(torch.equal(plain[name].target, moved[name].target) for name in plain)
    edit(single, lambda tensors: tensors[EXPERT].fill_(torch.inf))
    with pytest.raises(CheckpointError, match=f"{EXPERT} holds NaN or infinity"):
        load(single)


def test_sharded_equals_single(single, sharded):
    one, many = name_table(load(single)), name_table(load(sharded))
    assert all(torch.equal(one[name].target, many[name].target) for name in one)


def test_gate_and_index_weights_stay_fp32_in_bf16(single):
    model = load(single, torch.bfloat16)
    layer = model.layers[1]
    assert layer.attention.down.weight_ED.dtype == torch.bfloat16
    assert layer.attention.indexer and layer.attention.indexer.weights_nD.dtype == torch.float32
    assert vars(layer.feed_forward)["gate"].weight_ED.dtype == torch.float32


def test_conf_11_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    refused(sharded, victim.name, "no such file")


@pytest.mark.parametrize(
    "name", ["lm_head.weight", EXPERT, "model.layers.0.self_attn.indexer.k_norm.bias"]
)
def test_conf_11_a_missing_tensor_is_named(single, name):
    edit(single, lambda tensors: tensors.pop(name))
    refused(single, name, "missing")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "lm_head.weight_scale_inv",
        "visual.patch.weight",
        "",
    ],
)
def test_conf_11_an_unknown_tensor_is_named(single, name):
    edit(single, lambda tensors: tensors.update({name: torch.zeros(1)}))
    refused(single, name, SINGLE, "unknown")


@pytest.mark.parametrize("shape", [(64, 32), (32, 65), (32, 64, 1), (2048,)])
def test_conf_11_a_changed_shape_is_named(single, shape):
    edit(single, lambda tensors: tensors.update({EXPERT: torch.zeros(shape)}))
    refused(single, EXPERT, SINGLE, str(list(shape)), "[32, 64]")


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.float64, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]
)
def test_conf_11_a_changed_dtype_is_named(single, dtype):
    edit(single, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(dtype)}))
    refused(single, EXPERT, SINGLE, "dtype")


def test_conf_11_a_tensor_in_two_shards_is_named(sharded):
    first, *_, last = sorted(path.name for path in sharded.glob("*.safetensors"))
    name = next(iter(load_file(sharded / first)))
    edit(sharded, lambda tensors: tensors.update({name: torch.zeros(1)}), last)
    refused(sharded, name, first, last)


def test_conf_11_index_and_files_must_agree(sharded):
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    edit_json(sharded, INDEX, lambda index: index["weight_map"].update({EXPERT: files[-1]}))
    refused(sharded, EXPERT, INDEX)
    edit_json(sharded, INDEX, lambda index: index["weight_map"].pop(EXPERT))
    refused(sharded, EXPERT, INDEX)


def test_conf_06_mtp_tensors_are_skipped_and_other_layers_refused(single, caplog):
    edit_json(single, "config.json", lambda c: c.update(num_nextn_predict_layers=0))
    with caplog.at_level(logging.INFO, logger="minidsa.model.loader"):
        kept = check(single)
    assert not any(name.startswith("model.layers.4.") for name in kept)
    assert len(caplog.records) == 1
    assert "model.layers.4." in caplog.text
    name = "model.layers.9.input_layernorm.weight"
    edit(single, lambda tensors: tensors.update({name: torch.ones(64)}))
    refused(single, name, "num_hidden_layers = 4")


@pytest.mark.parametrize(
    ("with_mtp", "stored", "use"),
    [(False, True, "unused"), (True, True, "loaded"), (False, False, "none")],
)
def test_what_becomes_of_an_mtp_layer_is_known(single, with_mtp, stored, use):
    if not stored:
        edit(single, lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.4.")])
    checked = check_checkpoint(single, read_config(single), with_mtp=with_mtp)
    assert checked.mtp_layer == use
    if with_mtp:
        assert load_weights(checked, torch.float32, torch.device("cpu")).mtp is not None


def test_conf_04_mtp_layers_load_with_or_without_copies(single):
    copies = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")
    check(single)
    edit(single, lambda tensors: [tensors.pop(name) for name in copies])
    check(single)
    name = "model.layers.4.shared_head.extra.weight"
    edit(single, lambda tensors: tensors.update({name: torch.ones(64)}))
    refused(single, name)


def test_rope_tables_of_old_checkpoints_are_ignored(single):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(single, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert name not in check(single)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [EXPERT, "model.norm.weight", "lm_head.weight"])
def test_conf_11_non_finite_values_are_named(single, name, value):
    edit(single, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    check(single)
    with pytest.raises(CheckpointError, match=f"{SINGLE}.*{name}.*NaN or infinity"):
        load(single)


def test_values_too_large_for_the_dtype_are_named(single):
    edit(single, lambda tensors: tensors[EXPERT].view(-1)[:1].fill_(1e30))
    load(single)
    with pytest.raises(CheckpointError, match=EXPERT):
        load(single, torch.float16)


def test_tied_heads_need_no_head_and_ignore_an_equal_copy(single):
    edit_json(single, "config.json", lambda c: c.update(tie_word_embeddings=True))
    edit(single, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in check(single)
    edit(single, lambda tensors: tensors.pop("lm_head.weight"))
    model = load(single)
    assert model.head.linear.weight_ED is model.embedding.weight_VD


def test_a_head_that_differs_from_its_embedding_is_used_and_told(single):
    edit_json(single, "config.json", lambda c: c.update(tie_word_embeddings=True))
    head = load_file(single / SINGLE)["lm_head.weight"]
    checked = check_checkpoint(single, read_config(single))
    assert "lm_head.weight" in checked.tensors and not checked.config.tie_word_embeddings
    assert "tie_word_embeddings" in checked.notes[0] and "lm_head.weight" in checked.notes[0]
    assert torch.equal(load(single).head.linear.weight_ED, head)
    # One element in the last row is enough.
    edit(single, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    edit(single, lambda t: t["lm_head.weight"].view(-1)[-1:].add_(1))
    assert "lm_head.weight" in check(single)


@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_names_that_are_needed_are_those_of_the_table(tied, with_mtp):
    config = parse_config(dict(PRESETS["default"]) | {"tie_word_embeddings": tied})
    model = DeepseekModel(config, torch.float32, torch.device("meta"), with_mtp=with_mtp)
    table = {name: entry.shape for name, entry in name_table(model).items()}
    assert dict(needed_shapes(config, with_mtp=with_mtp)) == table


HUGE = {
    "layers": {"num_hidden_layers": 1024},
    "experts": {"num_hidden_layers": 1024, "n_routed_experts": 16384},
    "mtp": {"n_routed_experts": 16384, "num_nextn_predict_layers": 64},
    "heads": {
        "num_attention_heads": 4096,
        "num_key_value_heads": 4096,
        "qk_nope_head_dim": 65536,
        "rope_interleave": False,
    },
}


@pytest.mark.parametrize("claim", HUGE)
def test_conf_14_a_huge_claim_costs_what_the_files_hold(single, claim):
    """Millions of tensors are refused after the few hundred that are there, in flat memory."""
    edit_json(single, "config.json", lambda config: config.update(HUGE[claim]))
    tracemalloc.start()
    refused(single, "model.layers.")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_conf_14_mtp_layers_are_looked_up_and_not_listed(single):
    """A name of each of 64 layers makes no 64 tables of what such a layer might hold."""
    edit_json(single, "config.json", lambda config: config.update(num_nextn_predict_layers=64))
    names = [f"model.layers.{4 + i}.enorm.weight" for i in range(64)]
    edit(single, lambda tensors: tensors.update({name: torch.ones(64) for name in names}))
    assert not set(names) & set(check(single))
    edit(single, lambda tensors: tensors.update({"model.layers.68.enorm.weight": torch.ones(64)}))
    refused(single, "model.layers.68.enorm.weight", "unknown")


def test_a_bar_ends_at_the_bytes_that_are_loaded(single, monkeypatch):
    """Layers that are skipped are not waited for."""
    bars = []

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **(kwargs | {"disable": False, "file": io.StringIO()}))
            bars.append(self)

    monkeypatch.setattr(progress, "tqdm", Bar)
    load(single)
    (bar,) = bars
    assert bar.n == bar.total < (single / SINGLE).stat().st_size * 0.9


def test_the_default_preset_is_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        write_random_checkpoint(tmp_path / name, PRESETS["default"], seed=3)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for file in files:
        data = (tmp_path / "one" / file).read_bytes()
        assert data == (tmp_path / "two" / file).read_bytes()
        assert len(data) < 16 << 20
    check(tmp_path / "one")
    assert parse_config(PRESETS["default"]).indexer is not None
