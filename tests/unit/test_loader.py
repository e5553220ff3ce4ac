"""Checkpoints from strangers: exact and complete, or refused in one line before they are read."""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import T_CPU, T_WIDE, t_cpu, t_wide, tensors_of
from minidsa.model import make_checkpoint
from minidsa.model.checkpoint import INDEX, SINGLE, CheckpointError, read_config
from minidsa.model.config import parse_config
from minidsa.model.fp8 import dequantise, quantise, scale_shape
from minidsa.model.keys import ConfigError
from minidsa.model.loader import check_checkpoint, load_model
from minidsa.model.make_checkpoint import PRESETS, write_checkpoint, write_random_checkpoint
from minidsa.model.names import name_table

CPU = torch.device("cpu")
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def load(folder: Path, dtype=torch.float32):
    return load_model(folder, read_config(folder), dtype, CPU)


def check(folder: Path):
    return check_checkpoint(folder, read_config(folder))


@pytest.fixture
def single(tmp_path):
    """A private copy of T_CPU in one file."""
    return Path(shutil.copytree(t_cpu(), tmp_path / "single"))


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """T_CPU in several files and an index."""
    monkeypatch.setattr(make_checkpoint, "SHARD_BYTES", 400_000)
    write_checkpoint(tmp_path / "sharded", dict(T_CPU), tensors_of(T_CPU))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    return tmp_path / "sharded"


def edit(folder: Path, change, file: str = SINGLE):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def edit_json(folder: Path, name: str, change):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def refused(folder: Path, *names: str):
    """The checkpoint is refused within two seconds by one line that names all of `names`."""
    start = time.monotonic()
    with pytest.raises((CheckpointError, ConfigError)) as error:
        check(folder)
    assert time.monotonic() - start < 2
    message = str(error.value)
    assert "\n" not in message
    for name in names:
        assert name in message


def test_every_tensor_lands_in_its_place(single):
    model = load(single)
    tensors = load_file(single / SINGLE)
    attention = model.layers[1].attention
    prefix = "model.layers.1.self_attn."
    assert attention.up_EQ is not None and attention.indexer is not None
    assert torch.equal(attention.down_ED[:24], tensors[f"{prefix}q_a_proj.weight"])
    assert torch.equal(attention.down_ED[24:64], tensors[f"{prefix}kv_a_proj_with_mqa.weight"])
    # The indexer's first 8 rows are half-split pairs in the file and adjacent pairs here.
    rows = [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)]
    assert torch.equal(attention.down_ED[64:], tensors[f"{prefix}indexer.wk.weight"][rows])
    queries = tensors[f"{prefix}indexer.wq_b.weight"].view(4, 16, 24)[:, rows]
    assert torch.equal(attention.up_EQ[96:].view(4, 16, 24), queries)
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
    weights += [w for layer in layers for w in (layer.attention.down_ED, layer.attention.out_DE)]
    assert all(weight.isfinite().all() for weight in weights)
    rows = model.layers[1].feed_forward
    assert all(w.isfinite().all() for w in vars(rows).values() if isinstance(w, torch.Tensor))


def test_sharded_equals_single(single, sharded):
    one, many = name_table(load(single)), name_table(load(sharded))
    assert all(torch.equal(one[name].target, many[name].target) for name in one)


def test_gate_and_index_weights_stay_fp32_in_bf16(single):
    model = load(single, torch.bfloat16)
    layer = model.layers[1]
    assert layer.attention.down_ED.dtype == torch.bfloat16
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


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_conf_11_a_broken_index_is_named(sharded, content):
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


@pytest.mark.parametrize("damage", ["cut 1", "cut half", "one more", "much more", "empty", "zeros"])
def test_conf_12_damaged_files_are_named(single, damage):
    data = (single / SINGLE).read_bytes()
    changed = {
        "cut 1": data[:-1],
        "cut half": data[: len(data) // 2],
        "one more": data + b"\0",
        "much more": data + data,
        "empty": b"",
        "zeros": bytes(len(data)),
    }[damage]
    (single / SINGLE).write_bytes(changed)
    refused(single, SINGLE)


@pytest.mark.parametrize("where", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", ""])
def test_conf_12_an_index_stays_in_its_folder(sharded, where):
    shutil.copy(
        sharded / sorted(sharded.glob("*.safetensors"))[0], sharded.parent / "secret.safetensors"
    )
    edit_json(sharded, INDEX, lambda index: index["weight_map"].update({EXPERT: where}))
    refused(sharded, repr(where))


@pytest.mark.parametrize("name", [SINGLE, "config.json", "generation_config.json"])
def test_conf_13_links_out_of_the_folder_are_refused(single, tmp_path, name):
    """Nothing outside is opened: the target is a pipe, which would block whoever opens it."""
    (single / name).unlink()
    os.mkfifo(tmp_path / "outside")
    (single / name).symlink_to(tmp_path / "outside")
    refused(single, name, "outside")


CANARY = "import pathlib; pathlib.Path({!r}).write_text('run')"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_conf_13_code_of_the_checkpoint_is_refused(single, tmp_path, name):
    canary = tmp_path / "canary"
    (single / "evil.py").write_text(CANARY.format(str(canary)))
    if not (single / name).exists():
        (single / name).write_text("{}")
    edit_json(single, name, lambda c: c.update(auto_map={"AutoConfig": "evil.Config"}))
    refused(single, name, "auto_map")
    assert not canary.exists()


def test_conf_13_pickles_are_refused(single, tmp_path):
    canary = tmp_path / "canary"
    (single / SINGLE).unlink()
    command = CANARY.format(str(canary))
    pickled = b"cbuiltins\nexec\n(V" + command.encode() + b"\ntR."
    (single / "pytorch_model.bin").write_bytes(pickled)
    refused(single, "pytorch_model.bin", "pickle")
    (single / INDEX).write_text(json.dumps({"weight_map": {EXPERT: "pytorch_model.bin"}}))
    refused(single, "pytorch_model.bin", "safetensors")
    assert not canary.exists()


@pytest.mark.slow
def test_conf_13_refusals_survive_python_optimize(single):
    edit_json(single, "config.json", lambda c: c.update(auto_map={"AutoConfig": "evil.Config"}))
    code = (
        "from pathlib import Path; from minidsa.model.checkpoint import read_config;"
        f"read_config(Path({str(single)!r}))"
    )
    environment = dict(os.environ) | {"PYTHONOPTIMIZE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "auto_map" in result.stderr.splitlines()[-1]


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


def test_tied_heads_need_no_head_and_ignore_a_copy(single):
    edit_json(single, "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert "lm_head.weight" not in check(single)
    edit(single, lambda tensors: tensors.pop("lm_head.weight"))
    model = load(single)
    assert model.head.weight_VD is model.embedding.weight_VD


@pytest.mark.parametrize("shape", [(576, 256), (128, 128), (1, 300), (129, 127), (200, 200)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "e8m0", "uint8"])
def test_fp8_blocks_at_the_edges(shape, kind):
    rows, columns = shape
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(shape, generator=generator) * 50).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 134, scale_shape(shape), generator=generator)
    powers = torch.exp2(exponents - 127.0)
    scale = {
        "fp32": powers * 1.1,
        "bf16": powers.bfloat16(),
        "e8m0": powers.to(torch.float8_e8m0fnu),
        "uint8": exponents.to(torch.uint8),
    }[kind]
    if shape == (576, 256):
        assert scale.shape == (5, 2)
    factors = powers * 1.1 if kind == "fp32" else powers
    expected = torch.stack(
        [
            torch.stack(
                [weight[i, j].float() * factors[i // 128, j // 128] for j in (0, columns - 1)]
            )
            for i in range(rows)
        ]
    )
    assert torch.equal(dequantise(weight, scale)[:, [0, columns - 1]], expected)


def test_fp8_round_trip_is_within_its_rounding():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(2))
    weight[:128, :128] = 0
    back = dequantise(*quantise(weight))
    torch.testing.assert_close(back, weight, rtol=2**-4, atol=2e-3)


def test_fp8_checkpoint_equals_its_dequantised_weights(tmp_path):
    model = load(t_wide())
    stored = load_file(t_wide() / SINGLE) if (t_wide() / SINGLE).exists() else {}
    for path in t_wide().glob("model-*.safetensors"):
        stored |= load_file(path)
    names = [n for n in stored if n.endswith("_scale_inv") and ".layers.4." not in n]
    assert len(names) > 50
    table = name_table(model)
    for name in names:
        weight = name.removesuffix("_scale_inv")
        target = table[weight].target.clone()
        table[weight].fill(dequantise(stored[weight], stored[name]))
        assert torch.equal(table[weight].target, target)


@pytest.mark.parametrize(
    "fault", ["no scale", "scale shape", "scale dtype", "no config", "no weight"]
)
def test_fp8_scales_are_checked(tmp_path, fault):
    name = "model.layers.0.mlp.up_proj.weight"
    config = dict(T_WIDE) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    write_checkpoint(tmp_path, config, tensors_of(config))
    scale = f"{name}_scale_inv"
    edits = {
        "no scale": lambda tensors: tensors.pop(scale),
        "scale shape": lambda tensors: tensors.update({scale: torch.ones(2, 1)}),
        "scale dtype": lambda tensors: tensors.update({scale: torch.ones(2, 2).half()}),
        "no weight": lambda tensors: tensors.update({name: torch.ones(256, 256).bfloat16()}),
    }
    if fault == "no config":
        edit_json(tmp_path, "config.json", lambda c: c.pop("quantization_config"))
    else:
        edit(tmp_path, edits[fault])
    refused(tmp_path, "F8_E4M3" if fault == "no config" else scale)


def test_scales_may_stand_in_another_shard(tmp_path):
    config = dict(T_WIDE) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    write_checkpoint(tmp_path, config, tensors_of(config))
    before = load(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    (tmp_path / SINGLE).unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        parts["b.safetensors" if name.endswith("_inv") else "a.safetensors"][name] = tensor
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    one, many = name_table(before), name_table(load(tmp_path))
    assert all(torch.equal(one[name].target, many[name].target) for name in one)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '"x"', "[" * 100_000])
def test_a_broken_config_is_named(single, content):
    (single / "config.json").unlink()
    if content is not None:
        (single / "config.json").write_text(content)
    refused(single, "config.json")


def test_folders_without_weights_are_named(single, tmp_path):
    (single / SINGLE).unlink()
    refused(single, SINGLE)
    refused(tmp_path / "nowhere", "nowhere")


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
