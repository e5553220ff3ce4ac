"""The shipped weights: the oracle agrees, the indexer is needed, the first draft is accepted."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ROOT / "checkpoints" / "tiny-dsa"
TOKENIZER = str(SHIPPED / "tokenizer.json")


@pytest.fixture
def bench(monkeypatch):
    """The shipped model with few held-out chats."""
    monkeypatch.syspath_prepend(str(ROOT))
    from tokenizers import Tokenizer

    from training import evaluate, export

    tokenizer = Tokenizer.from_file(TOKENIZER)
    return evaluate.Bench(export.load(SHIPPED), tokenizer, TOKENIZER, rows=1, needle_chats=3)


@pytest.mark.slow
def test_transformers_reads_the_same_model(bench, monkeypatch):
    """Held-out text of five times top-k tokens, in fp32; logits reach 48."""
    from transformers import DeepseekV32ForCausalLM

    from training.corpus import Mix

    monkeypatch.setattr(
        DeepseekV32ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.6\..*"]
    )
    oracle = DeepseekV32ForCausalLM.from_pretrained(
        SHIPPED, dtype=torch.float32, attn_implementation="eager"
    )
    tokens, _ = bench.held_out(320, Mix())
    with torch.no_grad():
        ours = bench.model.lm_head(bench.model(tokens, attend="sparse").hidden)
        theirs = oracle(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attend", "low", "high"),
    [("sparse", 0.9, 1.0), ("random", 0.0, 0.1), ("window", 0.0, 0.2)],
)
def test_needles_are_found_by_the_indexer_alone(bench, attend, low, high):
    from training import evaluate

    found = evaluate.needle(bench, 600, "prose", attend)
    assert found["asked"] >= 4
    assert low <= found["recall"] <= high


@pytest.mark.slow
def test_first_drafts_are_mostly_what_the_model_says(bench):
    from training import evaluate
    from training.corpus import Mix

    chat = Mix(recall=0.0, repetition=0.0, plain=0.0, tools=0.0, thought=0.0)
    first, second = evaluate.draft_agreement(bench, 600, chat, "sparse", 2)
    assert first > 0.7 and second > 0.7
