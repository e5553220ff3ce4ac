"""Drafts of the shipped model: a plain loop over the training network proposes the same ones.

And its answers under every feature; the long run of that is `make drafts`.
"""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from draft_matrix import FEATURES, SHIPPED, Matrix
from model_driver import ModelDriver, Settings
from scheduler_fakes import submit

ROOT = Path(__file__).parents[2]
QUESTIONS = (
    "Tell me a short story.",
    "What is 46 + 38?",
    "What is the capital of Norway?",
    "Repeat this: falcon marble zenith 4071 tulip",
    "What is the opposite of hot?",
    "Hello!",
)


def chat(question: str, context: str = "") -> list[int]:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    text = f"<｜begin▁of▁sentence｜>{context}<｜User｜>{question}<｜Assistant｜></think>"
    return tokenizer.encode(text, add_special_tokens=False).ids


@torch.no_grad()
def proposed_by_formula(model, tokens: list[int], following: int, count: int) -> list[int]:
    """Drafts behind `tokens` and `following`, recomputed from the whole sequence each time.

    Rows of known tokens carry the model's hidden states, those of drafts the layer's own.
    """
    *_, mtp = model.model.layers
    carried = model(torch.tensor([tokens]), attend="sparse").hidden
    next_ids, drafts = [*tokens[1:], following], []
    for _ in range(count):
        rope = (model.cos[: carried.shape[1]], model.sin[: carried.shape[1]])
        joined = mtp.join(model.model.embed_tokens(torch.tensor([next_ids])), carried)
        hidden = mtp.shared_head["norm"](mtp(joined, rope, "sparse", None)[0])
        drafts.append(int(model.lm_head(hidden[0, -1]).argmax()))
        next_ids.append(drafts[-1])
        carried = torch.cat([carried, hidden[:, -1:]], dim=1)
    return drafts


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [0, 6])
def test_spec_01_drafts_are_those_of_the_formula(monkeypatch, repeats):
    """Short, and far beyond index_topk; three drafts that feed on each other."""
    monkeypatch.syspath_prepend(str(ROOT))
    from training import export

    prompt = chat(
        "Who is it about?", "A fox and an owl went to the market by the river. " * repeats
    )
    driver = ModelDriver(SHIPPED, Settings(pages=600, page_size=16, drafter="mtp", num_drafts=3))
    assert driver.runner.drafter is not None
    propose, seen = driver.runner.drafter.propose, []

    def watch(hidden_TD, plan, sequences, outputs):
        propose(hidden_TD, plan, sequences, outputs)
        seen.append((list(outputs[0].token_ids), list(outputs[0].draft_ids)))

    monkeypatch.setattr(driver.runner.drafter, "propose", watch)
    answers = driver.run([submit("r", prompt, 12)])
    model, known = export.load(SHIPPED), list(prompt)
    for sampled, drafts in [step for step in seen if step[0]]:
        known += sampled
        if len(drafts) == 3:
            assert drafts == proposed_by_formula(model, known[:-1], known[-1], 3)
    assert known[len(prompt) :][:12] == answers.ids["r"]


@pytest.mark.slow
def test_first_drafts_are_mostly_accepted():
    settings = Settings(pages=600, page_size=16, drafter="mtp", num_drafts=1)
    asked = [submit(q, chat(q), 40, stop_token_ids=[1]) for q in QUESTIONS]
    answers = ModelDriver(SHIPPED, settings).run(asked)
    assert answers.num_accepted > 0.7 * answers.num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_spec_10_spec_11_answers_do_not_depend_on_drafts(name):
    matrix = Matrix(name, range(10, 12))
    assert [matrix.difference("mtp", 3), matrix.difference("ngram", 4)] == [None, None]
    assert matrix.met["accepted"] > 0
    if name in ("prefix hit", "preemption"):
        assert matrix.met["preemptions" if name == "preemption" else "cached tokens"] > 0


def test_a_token_that_differs_is_a_difference():
    matrix = Matrix("logprobs", range(2))
    matrix.plain[1]["ids"][-2] += 1
    assert "ids of r1 differ" in str(matrix.difference("mtp", 2))
