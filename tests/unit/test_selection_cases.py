"""The indexer end to end, against the oracle: rotation layouts, crafted markers, ties, NaN rows."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import oracle
from checkpoints import NAN_TOKEN, T_CPU, new_folder, t_nan, tensors_of
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.model.checkpoint import read_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.loader import load_model
from minidsa.model.make_checkpoint import write_checkpoint
from stepper import Stepper, new_storage

TOPK = T_CPU["index_topk"]
MARKER = 300


def load(folder) -> DeepseekModel:
    return load_model(folder, read_config(folder), torch.float32, torch.device("cpu"))


def written(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> DeepseekModel:
    folder = new_folder()
    write_checkpoint(folder, dict(config), tensors)
    return load(folder)


def run(model: DeepseekModel, tokens: list[int]) -> tuple[torch.Tensor, dict[int, list[set[int]]]]:
    """Logits of a prompt in one chunk, and what each layer selected for each row."""
    selected: dict[int, list[set[int]]] = {}

    def watch(layer: int, positions: torch.Tensor, counts: torch.Tensor) -> None:
        pairs = zip(positions.tolist(), counts.tolist(), strict=True)
        selected[layer] = [set(chosen[:count]) for chosen, count in pairs]

    storage = new_storage(model, 64, 8)
    backend = DsaBackend(TorchDenseBackend(storage), storage, TOPK, on_select=watch)
    return Stepper(model, backend, storage).prefill("a", tokens, len(tokens)), selected


def prompt(length: int) -> list[int]:
    return torch.randint(2, 256, (length,), generator=torch.Generator().manual_seed(9)).tolist()


@functools.cache
def layout(interleaved: bool | None) -> tuple[dict[str, Any], DeepseekModel]:
    """T_CPU with enough index heads to have no ties, and the field set or left out."""
    config = dict(T_CPU) | {"index_n_heads": 12}
    if interleaved is not None:
        config["indexer_rope_interleave"] = interleaved
    return config, written(config, tensors_of(config))


@pytest.mark.parametrize("interleaved", [None, False, True])
def test_num_01_and_02_the_rotation_of_the_index_follows_its_field(interleaved):
    config, model = layout(interleaved)
    tokens = prompt(64)
    _, selected = run(model, tokens)
    traces = {
        split: oracle.run(
            tensors_of(config), config | {"indexer_rope_interleave": not split}, tokens
        )
        for split in (True, False)
    }
    wanted, other = traces[not interleaved], traces[bool(interleaved)]
    ours = [selected[layer] for layer in range(4)]
    assert ours == [[set(row) for row in rows] for rows in wanted.selected]
    assert ours[0] != [set(row) for row in other.selected[0]]


def test_num_01_short_prompts_do_not_depend_on_the_rotation():
    tokens = prompt(TOPK)
    logits = [run(layout(interleaved)[1], tokens)[0] for interleaved in (True, False)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@functools.cache
def marked() -> tuple[dict[str, torch.Tensor], DeepseekModel]:
    """Every index head looks for one hidden channel that only MARKER's embedding has.

    It reaches the last, unrotated dimension of the index key, which is large for MARKER alone. The
    queries look along that dimension only, made from a channel that all tokens share.
    """
    tensors = tensors_of(T_CPU)
    own, shared = 0, 1
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[[own, shared]] = 0
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, own], embedding[:, shared] = 0, 4
    embedding[MARKER, own] = 12
    for layer in range(4):
        prefix = f"model.layers.{layer}.self_attn."
        # Not a rotated dimension: the last one of the index head.
        tensors[f"{prefix}indexer.wk.weight"][-1] = 0
        tensors[f"{prefix}indexer.wk.weight"][-1, own] = 30
        tensors[f"{prefix}q_a_proj.weight"][0] = 0
        tensors[f"{prefix}q_a_proj.weight"][0, shared] = 10
        queries = tensors[f"{prefix}indexer.wq_b.weight"].view(4, 16, 24)
        queries[:, -1] = 0
        queries[:, -1, 0] = 20
        weights = tensors[f"{prefix}indexer.weights_proj.weight"]
        weights.zero_()
        weights[:, shared] = 1
    return tensors, written(T_CPU, tensors)


@pytest.mark.parametrize("place", [0, 64, 110])
def test_num_16_a_marker_is_always_selected(place):
    """128 tokens against a top-k of 16: dropping the selection would change the result."""
    tensors, model = marked()
    tokens = prompt(128)
    tokens[place] = MARKER
    logits, selected = run(model, tokens)
    trace = oracle.run(tensors, T_CPU, tokens)
    for layer in range(4):
        for row in range(place, 128):
            assert place in selected[layer][row]
            assert len(selected[layer][row]) == min(row + 1, TOPK)
    difference = (logits.log_softmax(-1) - trace.logits.log_softmax(-1)).abs().amax(-1)
    assert difference.max() < 1e-3


@pytest.mark.parametrize("length", [15, 16, 17, 64])
def test_num_07_and_19_equal_scores_keep_the_lowest_positions(length):
    tensors = tensors_of(T_CPU)
    for name, tensor in tensors.items():
        if name.endswith("weights_proj.weight"):
            tensor.zero_()
    model = written(T_CPU, tensors)
    tokens = prompt(length)
    logits, selected = run(model, tokens)
    assert bool(selected) == (length > TOPK)
    for rows in selected.values():
        assert rows == [set(range(min(row + 1, TOPK))) for row in range(length)]
    trace = oracle.run(tensors, T_CPU, tokens)
    torch.testing.assert_close(
        logits.log_softmax(-1), trace.logits.log_softmax(-1), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("where", ["prompt", "decode"])
def test_num_20_a_nan_row_stays_in_its_request(where):
    """Eight requests in every step; one turns to NaN, the others go on as if it had not.

    Not bit for bit: the NaN row visits other experts, whose products then have other sizes.
    """
    model = load(t_nan())
    names = [f"r{i}" for i in range(8)]

    def logits(poisoned: bool) -> dict[str, torch.Tensor]:
        storage = new_storage(model, 128, 8)
        backend = DsaBackend(TorchDenseBackend(storage), storage, TOPK)
        steps = Stepper(model, backend, storage)
        prompts = {name: prompt(20 + i) for i, name in enumerate(names)}
        if poisoned and where == "prompt":
            prompts["r3"][5] = NAN_TOKEN
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        first = steps.step(list(prompts.items()), 8)
        for name, own in zip(names, first.split([len(p) for p in prompts.values()]), strict=True):
            rows[name].append(own)
        for i in range(6):
            token = NAN_TOKEN if poisoned and where == "decode" and i == 2 else 7 + i
            parts = [(name, [token if name == "r3" else 7 + i]) for name in names]
            for name, own in zip(names, steps.step(parts, 0), strict=True):
                rows[name].append(own.unsqueeze(0))
        return {name: torch.cat(own) for name, own in rows.items()}

    clean, dirty = logits(poisoned=False), logits(poisoned=True)
    assert all(own.isfinite().all() for own in clean.values())
    assert dirty["r3"][5 if where == "prompt" else 23 + 2].isnan().all()
    for name in names:
        if name != "r3":
            torch.testing.assert_close(clean[name], dirty[name], rtol=0, atol=1e-4)
            assert torch.equal(clean[name].argmax(-1), dirty[name].argmax(-1))
