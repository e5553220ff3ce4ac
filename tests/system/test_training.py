"""The shipped checkpoint's making: split, encoding, export, and a training in smoke size."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ROOT / "checkpoints" / "tiny-dsa"


@pytest.fixture(autouse=True)
def root_on_path(monkeypatch):
    """training/ is a program of the repository, not a part of the installed package."""
    monkeypatch.syspath_prepend(str(ROOT))


def test_held_out_documents_are_never_trained_on():
    from training.corpus import Mix, Source, documents

    def drawn(held_out: bool, count: int):
        source = Source("", Mix(recall=0.0, extra=0.0), 1, 1, seed=3, held_out=held_out)
        return {repr(chat.turns) for chat in islice(documents(source, 0), count)}

    from training.slots import Slots

    assert not drawn(True, 40) & drawn(False, 800)
    slots = Slots(0)
    sides = set()
    for _ in range(400):
        slots.drawn.clear()
        slots.pick("things")
        slots.digits(3)
        sides.add(slots.held_out)
    assert sides == {True, False}


def as_messages(chat):
    """The same chat as the server takes it."""
    from minidsa.server.chat_messages import Message, ToolCall

    tools = tuple({"type": "function", "function": tool} for tool in chat.tools)
    turns = list(chat.turns)
    out = []
    if turns[0].role == "system":
        out.append(Message("system", turns.pop(0).text, tools=tools))
    elif tools:
        out.append(Message("system", "", tools=tools))
    for turn in turns:
        if turn.role == "tool":
            out += [Message("tool", result) for result in turn.results]
            continue
        calls = tuple(ToolCall("", c.name, json.dumps(c.arguments)) for c in turn.calls)
        out.append(Message(turn.role, turn.text, reasoning=turn.reasoning, tool_calls=calls))
    return out


def test_chats_are_encoded_as_the_server_encodes_them():
    from minidsa.server.chat_encoding import encode_messages
    from training.chat_format import pieces
    from training.corpus import Mix, Source, documents

    mix = Mix(talk=0.3, recall=0.2, tools=0.4, thought=0.1, plain=0.0)
    for chat in islice(documents(Source("", mix, 1, 1, seed=5), 0), 200):
        ours = "".join(text for text, _ in pieces(chat))
        runs = encode_messages(as_messages(chat), chat.thinking)
        assert ours == "".join(run if isinstance(run, str) else run.literal for run in runs)


def test_pieces_encode_like_the_whole_text():
    """Pieces meet at added tokens only, else training and serving would cut words differently."""
    from tokenizers import Tokenizer

    from training.chat_format import pieces
    from training.corpus import Mix, Source, documents, encode

    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    mix = Mix(talk=0.2, recall=0.2, tools=0.4, thought=0.2)
    for chat in islice(documents(Source("", mix, 1, 1, seed=5), 0), 60):
        parts = pieces(chat)
        [(ids, weights)] = encode(tokenizer, [parts])
        whole = tokenizer.encode("".join(text for text, _ in parts), add_special_tokens=False)
        assert whole.ids == ids
        assert len(weights) == len(ids)


def test_special_tokens_have_v32_names_and_flags():
    added = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = {token["content"] for token in added if token["special"]}
    assert special == {
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        "｜DSML｜",
    }
    plain = {token["content"] for token in added if not token["special"]}
    assert {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"} <= plain


def test_shipped_files_are_small():
    sizes = [file.stat().st_size for file in SHIPPED.iterdir()]
    assert max(sizes) <= 15_000_000
    assert sum(sizes) <= 40_000_000


def test_training_network_equals_transformers(tmp_path):
    """Random weights, sparse attention, 200 tokens against a top-k of 16; 1e-4 in fp32."""
    from transformers import DeepseekV32ForCausalLM

    from training import export
    from training.config import SMOKE
    from training.network import TinyDsa

    torch.manual_seed(0)
    model = TinyDsa(SMOKE)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1) if param.dim() == 1 else param.mul_(2)
    export.export(model, tmp_path)
    model = export.load(tmp_path)
    oracle = DeepseekV32ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(0, SMOKE.vocab_size, (2, 200))
    with torch.no_grad():
        ours = model.lm_head(model(ids, attend="sparse").hidden)
        dense = model.lm_head(model(ids).hidden)
        theirs = oracle(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert (dense - theirs).abs().max() > 0.01


def test_window_and_random_selections_keep_topk_keys():
    from training.config import SMOKE
    from training.network import Attention

    attention = Attention(SMOKE)
    x = torch.zeros(1, 64, SMOKE.hidden_size)
    seen = torch.arange(1, 65).clamp_max(SMOKE.index_topk)
    for attend in ("window", "random"):
        mask = attention.allowed(attend, None, x)
        assert mask is not None
        assert torch.equal(mask.sum(-1).flatten(), seen)
        assert torch.equal(mask & torch.ones(64, 64).tril().bool(), mask)


def test_fp8_twin_round_trips_within_a_sixteenth():
    from training.fp8 import dequantise, quantise

    weight = torch.randn(300, 200)
    values, scale = quantise(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (3, 2)
    assert torch.equal(scale.log2(), scale.log2().round())
    # e4m3 has three mantissa bits; below 2^-6 of a block's scale its step is constant.
    error = (dequantise(values, scale) - weight).abs()
    assert bool((error <= weight.abs() / 16 + 2**-10 * scale.max()).all())


def test_fp8_twin_quantises_what_v32_quantises(tmp_path):
    from training import fp8
    from training.export import read_tensors

    fp8.write_twin(SHIPPED, tmp_path)
    tensors = read_tensors(tmp_path)
    kinds = {name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn}
    assert {f"{name}_scale_inv" for name in kinds} <= tensors.keys()
    prefix = "model.layers.6."
    assert f"{prefix}self_attn.indexer.wk.weight" in kinds
    assert f"{prefix}mlp.experts.15.down_proj.weight" in kinds
    kept = ("eh_proj.weight", "self_attn.indexer.weights_proj.weight", "mlp.gate.weight")
    assert not kinds & {prefix + name for name in kept}


def test_optimizer_orthogonalises_batches():
    from training.optim import orthogonalise

    torch.manual_seed(0)
    for shape in ((3, 64, 16), (2, 16, 64)):
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert singular.min() > 0.4
        assert singular.max() < 1.5


@pytest.fixture
def main(monkeypatch):
    """The command in this process, without its settings of the process that other tests share."""
    from training import __main__ as command

    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _precision: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return command.main


@pytest.mark.slow
def test_smoke_training_goes_from_data_to_gates(tmp_path, main, capsys):
    """All phases in a few steps; the gates are missed, of course, and the files are there."""
    sizes = ("--steps", "4", "--batch-tokens", "1024", "--minutes", "5")
    command = ["--device", "cpu", "--preset", "smoke", "--out", str(tmp_path), *sizes]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "after sparse" in said
    assert "FAIL needle recall" in said
    assert (tmp_path / "model-00001-of-00001.safetensors").is_file()
    from training import export

    assert export.load(tmp_path).config.vocab_size == 1024


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--extra-licence", "mit"), "no .txt file there"),
        (("--extra-licence", "gpl-3.0"), "use one of public-domain"),
    ],
)
def test_bad_extra_text_is_one_line_that_says_what_to_do(tmp_path, arguments, says, main, capsys):
    folder = str(tmp_path)
    assert main(["--device", "cpu", "--out", folder, "--extra-text", folder, *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_folder_without_weights_is_one_line_that_says_what_to_do(tmp_path, main, capsys):
    (tmp_path / "config.json").write_bytes((SHIPPED / "config.json").read_bytes())
    out = str(tmp_path / "out")
    assert main(["--device", "cpu", "--out", out, "--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "model.safetensors.index.json is missing" in error
    assert error.count("\n") == 1


def test_running_out_of_gpu_memory_is_one_line_that_says_what_to_do(
    tmp_path, main, monkeypatch, capsys
):
    from training import __main__ as command

    def too_large(_args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(command, "train", too_large)
    assert main(["--out", str(tmp_path), "--batch-tokens", "65536"]) == 2
    assert capsys.readouterr().err == "error: out of GPU memory; try --batch-tokens 32768\n"
