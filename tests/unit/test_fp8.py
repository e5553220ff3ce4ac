"""Block-scaled fp8 weights: edges, kinds of scales, and what a checkpoint must hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_edits import edit, edit_json, load, refused
from checkpoints import T_WIDE, t_wide, tensors_of
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.configs.engine import EngineConfig
from minidsa.model import loading
from minidsa.model.checkpoint import INDEX, SINGLE, read_config
from minidsa.model.fp8 import dequantise, quantise, scale_shape
from minidsa.model.layers.fp8 import Fp8Linear
from minidsa.model.layers.linear import Linear
from minidsa.model.loader import check_checkpoint, load_weights
from minidsa.model.make_checkpoint import write_checkpoint
from minidsa.model.names import name_table
from stepper import Stepper, new_storage

CPU = torch.device("cpu")


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


ODD = {"qk_nope_head_dim": 80, "v_head_dim": 48, "kv_lora_rank": 192, "num_attention_heads": 3}


@pytest.mark.parametrize("fields", [{}, ODD | {"num_key_value_heads": 3}], ids=["even", "odd"])
def test_conf_08_the_absorbed_form_reads_fp8_scales_as_the_expanded_one_does(tmp_path, fields):
    """kv_b has scales of its own blocks: [384, 192] is three by two of them, the last cut short."""
    config = dict(T_WIDE) | fields | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    write_checkpoint(tmp_path, config, tensors_of(config))
    model = load(tmp_path)
    stored = {n: t for path in tmp_path.glob("*.safetensors") for n, t in load_file(path).items()}
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    scale = stored[f"{name}_scale_inv"]
    blocks = [torch.arange(size) // 128 for size in stored[name].shape]
    by_element = stored[name].float() * scale[blocks[0]][:, blocks[1]]
    layer = model.layers[1].attention.layer
    heads, _, latent = layer.w_uk_HNC.shape
    halves = torch.cat((layer.w_uk_HNC, layer.w_uv_HVC), dim=1)
    assert torch.equal(halves, by_element.view(heads, -1, latent))

    tokens = torch.randint(512, (40,), generator=torch.Generator().manual_seed(8)).tolist()
    rows = {}
    for form in ("expanded", "absorbed"):
        storage = new_storage(model, num_pages=12, page_size=4)
        stepper = Stepper(model, TorchDenseBackend(storage), storage)
        parts = [tokens] if form == "expanded" else [[token] for token in tokens]
        rows[form] = torch.cat([stepper.step([("a", p)], len(p) > 1) for p in parts])
    torch.testing.assert_close(rows["expanded"], rows["absorbed"], rtol=2e-4, atol=2e-4)


def test_weights_that_stay_in_fp8_are_those_of_the_file():
    checkpoint = check_checkpoint(t_wide(), read_config(t_wide()), with_mtp=True)
    assert checkpoint.all_fp8
    model = load_weights(checkpoint, torch.float16, CPU, keeps_fp8=True)
    plain, kept = name_table(load(t_wide())), 0
    for name, entry in name_table(model).items():
        if entry.scales is None:
            continue
        kept += 1
        values, scales = entry.target, entry.scales
        if values.dim() == 3:
            # A shared expert: rows [s, I, D], or columns [D, s, I].
            first = int("down_proj" in name)
            values, scales = (x.flatten(first, first + 1) for x in (values, scales))
        if name in plain:
            expected = plain[name].target.reshape(values.shape)
            assert torch.equal(dequantise(values, scales), expected)
    assert kept > 50


def test_a_model_with_fp8_products_says_what_the_dequantised_one_says(tmp_path):
    """The products are interpreted; half of the difference is the interpreter's own rounding.

    A layer of each kind: without experts and with them.
    """
    config = dict(T_WIDE) | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    write_checkpoint(tmp_path, config, tensors_of(config))
    checkpoint = check_checkpoint(tmp_path, read_config(tmp_path))
    models = [
        load_weights(checkpoint, torch.float16, CPU, keeps_fp8=keeps) for keeps in (False, True)
    ]
    ids = list(range(20, 44))
    logits = []
    for model in models:
        storage = new_storage(model, 8, 16)
        backend = DsaBackend(TorchDenseBackend(storage), storage, 2048)
        logits.append(Stepper(model, backend, storage).prefill("a", ids, 16).float())
    plain, kept = logits
    assert float((plain - kept).norm() / plain.norm()) < 0.2


ALIGNED = {
    "v32": {},
    "no indexer": {"model_type": "deepseek_v3"},
    "no q-lora": {"model_type": "deepseek_v3", "q_lora_rank": None},
}


@pytest.mark.parametrize("fields", ALIGNED.values(), ids=ALIGNED)
def test_the_first_projection_stays_in_fp8_where_each_part_begins_with_a_block(tmp_path, fields):
    """The rotated keys end within a block. Index keys are half-split: reordered in their block."""
    kept, plain = first_projections(tmp_path, fields)
    assert isinstance(kept, Fp8Linear) and isinstance(plain, Linear)
    assert len(kept.weight_ED) % 128 == 64
    assert torch.equal(dequantise(kept.weight_ED, kept.scales).half(), plain.weight_ED)


CUT = {
    "query latent": {"q_lora_rank": 192},
    "index key": {"index_head_dim": 64},
    "half-split index key of two blocks": {"index_head_dim": 256},
    "half-split rows": {"model_type": "deepseek_v3", "rope_interleave": False},
}


@pytest.mark.parametrize("fields", CUT.values(), ids=CUT)
def test_the_first_projection_is_dequantised_where_blocks_would_be_cut(tmp_path, fields):
    kept, plain = first_projections(tmp_path, fields)
    assert isinstance(kept, Linear) and torch.equal(kept.weight_ED, plain.weight_ED)


def first_projections(folder: Path, fields: dict[str, Any]) -> list[Linear | Fp8Linear]:
    """Of the same checkpoint of one layer, with weights kept in fp8 and without."""
    config = dict(T_WIDE) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0} | fields
    write_checkpoint(folder, config, tensors_of(config))
    checkpoint = check_checkpoint(folder, read_config(folder))
    models = (load_weights(checkpoint, torch.float16, CPU, keeps_fp8=k) for k in (True, False))
    return [model.layers[0].attention.down for model in models]


@pytest.mark.parametrize("name", ["o_proj", "experts.3.up_proj", "indexer.wk", "kv_b_proj"])
def test_one_plain_weight_keeps_the_others_from_staying_in_fp8(tmp_path, monkeypatch, name):
    """Only products that would take fp8 matter."""
    config = dict(T_WIDE) | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    write_checkpoint(tmp_path, config, tensors_of(config))
    part = "mlp" if "experts" in name else "self_attn"
    weight = f"model.layers.1.{part}.{name}.weight"

    def plain(tensors: dict) -> None:
        scale = tensors.pop(f"{weight}_scale_inv")
        tensors[weight] = dequantise(tensors[weight], scale).bfloat16()

    edit(tmp_path, plain)
    checked = check_checkpoint(tmp_path, read_config(tmp_path))
    assert checked.all_fp8 is (name == "kv_b_proj")
    monkeypatch.setattr(loading, "multiplies_fp8", lambda device: True)
    start = loading.check_start(EngineConfig(model=str(tmp_path), dtype="bfloat16"))
    why = f"dequantised to bfloat16: {weight} is not in fp8"
    kept = "kept in fp8" if name == "kv_b_proj" else why
    assert f"fp8 weights are {kept}" in start.notes
