"""Against transformers: random checkpoints that it writes, logits and selections at every position.

Prompts reach six times `index_topk`; below it the sparse path selects everything and would prove
nothing. transformers breaks ties of index scores at random, so the checkpoints have a dozen index
heads: a key that all of them reject, whose score is exactly 0, hardly ever occurs.
"""

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import oracle
from checkpoint_edits import edit_json
from checkpoints import T_CPU, new_folder
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.model.checkpoint import read_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.loader import load_model
from stepper import Stepper, new_storage

TOPK = 16
LONGEST = 6 * TOPK
CHUNKS = (LONGEST, 1, 7, 64)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
V32 = {
    "index_n_heads": 12,
    "rope_parameters": PLAIN_ROPE,
    "num_nextn_predict_layers": 0,
}
V3 = V32 | {"model_type": "deepseek_v3"}
ODD_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 5, "index_n_heads": 13}
CASES: dict[str, dict[str, Any]] = {
    "v32": V32,
    "v32-yarn-odd-heads": V32 | ODD_HEADS | {"rope_parameters": YARN, "n_shared_experts": 2},
    "v32-dense-only": V32 | {"first_k_dense_replace": 4},
    "v32-one-group-tied": V32 | {"n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    "v3": V3 | {"rms_norm_eps": 1e-3},
    "v3-no-q-lora-yarn": V3 | {"q_lora_rank": None, "rope_parameters": YARN},
    "v3-half-split": V3 | {"rope_interleave": False, "norm_topk_prob": False},
    "v3-wide-latent": V3 | {"kv_lora_rank": 160},
}


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    reference: Any
    folder: Path
    model: DeepseekModel


@functools.cache
def pair(name: str) -> Pair:
    """Let transformers write a random checkpoint, and load it."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    fields = {k: v for k, v in T_CPU.items() if k not in {"rope_theta", "torch_dtype"}} | CASES[
        name
    ]
    if fields["model_type"] == "deepseek_v32":
        config, family = (
            transformers.DeepseekV32Config(**fields),
            transformers.DeepseekV32ForCausalLM,
        )
    else:
        config, family = transformers.DeepseekV3Config(**fields), transformers.DeepseekV3ForCausalLM
    reference = family(config).eval()
    randomise(reference)
    folder = new_folder()
    reference.save_pretrained(folder)
    model = load_model(folder, read_config(folder), torch.float32, torch.device("cpu"))
    model.pack()
    return Pair(reference, folder, model)


@torch.no_grad()
def randomise(reference: torch.nn.Module) -> None:
    """Weights that keep activations near 1 and leave the next token neither certain nor open."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in (*reference.named_parameters(), *reference.named_buffers()):
        values = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(values * 0.1)
        elif "norm" in name:
            weight.copy_(values * 0.1 + 1)
        elif "embed_tokens" in name:
            weight.copy_(values)
        elif "inv_freq" not in name:
            weight.copy_(values * weight.shape[-1] ** -0.5)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def expected(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Reference logprobs [T, vocab] of the longest prompt, and each layer's selection [T, K]."""
    selections: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, out: selections.append(out[0]))
        for path, module in pair(name).reference.named_modules()
        if path.endswith(".indexer")
    ]
    with torch.no_grad():
        logits = pair(name).reference(torch.tensor([prompt(LONGEST)])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1), selections


@pytest.mark.parametrize(("name", "values"), [("v32", 0), ("v3-wide-latent", 16)])
def test_values_become_a_part_of_the_projection_where_that_stays_small(name, values):
    for layer in pair(name).model.layers:
        assert layer.attention.layer.w_uv_HVC.shape[1] == values


class Selections:
    """What each layer's indexer chose for the rows of one sequence, in the order of its rows."""

    def __init__(self) -> None:
        self.rows: dict[int, list[set[int]]] = {}

    def __call__(self, layer: int, positions: torch.Tensor, counts: torch.Tensor) -> None:
        for chosen, count in zip(positions.tolist(), counts.tolist(), strict=True):
            assert all(position < 0 for position in chosen[count:])
            self.rows.setdefault(layer, []).append(set(chosen[:count]))


def stepper(name: str, page_size: int, watch: Selections | None = None) -> Stepper:
    model = pair(name).model
    storage = new_storage(model, 1000 // page_size, page_size)
    backend = TorchDenseBackend(storage)
    if model.config.indexer is not None:
        topk = model.config.indexer.topk
        backend = DsaBackend(backend, storage, topk, on_select=watch)
    return Stepper(model, backend, storage)


def assert_close(logits: torch.Tensor, logprobs: torch.Tensor) -> None:
    assert (logits.log_softmax(-1) - logprobs).abs().max().item() <= 1e-4


def compare_prefill(name: str, page_size: int, chunk: int) -> None:
    watch = Selections()
    logprobs, selections = expected(name)
    assert_close(stepper(name, page_size, watch).prefill("a", prompt(LONGEST), chunk), logprobs)
    assert len(watch.rows) == len(selections)
    for layer, rows in watch.rows.items():
        # Chunks that end within the first TOPK tokens are dense: nothing is selected there.
        first = LONGEST - len(rows)
        assert first <= TOPK
        for row, chosen in enumerate(rows, start=first):
            theirs = {t for t in selections[layer][row].tolist() if t <= row}
            assert chosen == theirs, f"layer {layer}, row {row}"


@pytest.mark.parametrize(("page_size", "chunk"), [(16, LONGEST), (64, 7), (4, 64)])
@pytest.mark.parametrize("name", CASES)
def test_prefill_in_chunks(name, page_size, chunk):
    compare_prefill(name, page_size, chunk)


@pytest.mark.deep
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_prefill_in_chunks_deep(name, page_size, chunk):
    compare_prefill(name, page_size, chunk)


def compare_greedy(name: str, page_size: int, length: int, count: int) -> None:
    tokens = prompt(length, seed=length)
    steps = stepper(name, page_size)
    logits = [steps.prefill("a", tokens, 64)]
    first = int(logits[0][-1].argmax())
    more, rows = steps.greedy("a", first, count - 1)
    ours = [*tokens, first, *more]
    with torch.no_grad():
        reference = pair(name).reference
        logprobs = reference(torch.tensor([ours[:-1]])).logits[0].log_softmax(-1)
        generated = reference.generate(
            torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    assert generated[0].tolist() == ours
    assert_close(torch.cat([*logits, rows]), logprobs)


@pytest.mark.parametrize("name", CASES)
def test_48_greedy_tokens(name):
    compare_greedy(name, 4, 5, 48)


@pytest.mark.deep
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, LONGEST])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_48_greedy_tokens_deep(name, page_size, length):
    compare_greedy(name, page_size, length, 48)


@pytest.mark.parametrize("name", ["v32", "v3-no-q-lora-yarn"])
def test_num_19_mixed_steps_of_many_lengths(name):
    """Chunks of some requests beside decodes of others, at and around page and top-k borders."""
    steps = stepper(name, 4)
    full = prompt(LONGEST)
    logprobs, _ = expected(name)
    lengths = {"a": 15, "b": 16, "c": 17, "d": 3, "e": 4, "f": 5}
    for other, length in lengths.items():
        assert_close(steps.step([(other, full[:length])], 1), logprobs[:length])
    for i in range(8):
        done = i * 9
        parts = [("long", full[done : done + 9]), ("one", full[i : i + 1])]
        parts += [(other, [full[length + i]]) for other, length in lengths.items()]
        rows = [*range(done, done + 9), i, *(length + i for length in lengths.values())]
        assert_close(steps.step(parts, 2), logprobs[rows])


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_agrees_with_transformers(name):
    folder = pair(name).folder
    raw = json.loads((folder / "config.json").read_text())
    trace = oracle.run(load_file(folder / "model.safetensors"), raw, prompt(LONGEST))
    logprobs, selections = expected(name)
    assert_close(trace.logits, logprobs)
    for chosen, theirs in zip(trace.selected, selections, strict=True):
        for row in range(LONGEST):
            assert set(chosen[row]) == {t for t in theirs[row].tolist() if t <= row}


def test_bf16_follows_fp32():
    """Without experts and selection, whose choices may flip, only rounding is left."""
    folder = pair("v32-dense-only").folder
    narrow = load_model(folder, read_config(folder), torch.bfloat16, torch.device("cpu"))
    storage = new_storage(narrow, 64, 16)
    steps = Stepper(narrow, DsaBackend(TorchDenseBackend(storage), storage, TOPK), storage)
    logits = steps.prefill("a", prompt(LONGEST)[:TOPK], 7)
    assert logits.dtype == torch.float32
    difference = logits.log_softmax(-1) - expected("v32-dense-only")[0][:TOPK]
    assert 1e-4 < difference.abs().max().item() < 0.3


def test_a_head_that_differs_from_its_embedding_is_used_on_both_sides():
    """config.json says that it is tied; the file says otherwise, and the file counts."""
    from transformers import DeepseekV3ForCausalLM

    folder = new_folder()
    shutil.copytree(pair("v3").folder, folder, dirs_exist_ok=True)
    edit_json(folder, "config.json", lambda config: config.update(tie_word_embeddings=True))
    reference = DeepseekV3ForCausalLM.from_pretrained(folder)
    model = load_model(folder, read_config(folder), torch.float32, torch.device("cpu"))
    assert torch.equal(model.head.linear.weight_ED, reference.lm_head.weight)
    assert not torch.equal(reference.lm_head.weight, reference.model.embed_tokens.weight)
