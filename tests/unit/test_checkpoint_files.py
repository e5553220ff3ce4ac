"""Folders from strangers: damaged, misleading or malicious files are refused unread."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from checkpoint_edits import edit_json, refused
from minidsa.model.checkpoint import INDEX, SINGLE

EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


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
