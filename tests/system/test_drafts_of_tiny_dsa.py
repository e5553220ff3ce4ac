"""Drafts of the shipped model: a plain loop over the training network proposes the same ones."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from minidsa.scheduler.messages import Submit
from model_driver import Answers, ModelDriver, Settings
from scheduler_fakes import submit

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "checkpoints" / "tiny-dsa"
QUESTIONS = (
    "Tell me a short story.",
    "What is 46 + 38?",
    "What is the capital of Norway?",
    "Repeat this: falcon marble zenith 4071 tulip",
    "What is the opposite of hot?",
    "Hello!",
)
FEATURES = {
    "plain": {},
    "seeded": {"temperature": 1.0, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "logprobs": {"logprobs": 3},
    "bias": {"logit_bias": {100: 3.0, 200: -100.0}},
    "min_tokens": {"min_tokens": 30},
}


def chat(question: str, context: str = "") -> list[int]:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    text = f"<｜begin▁of▁sentence｜>{context}<｜User｜>{question}<｜Assistant｜></think>"
    return tokenizer.encode(text, add_special_tokens=False).ids


def requests(feature: str, count: int, max_tokens: int = 40) -> list[Submit]:
    rng = random.Random(feature)
    submits = []
    for i in range(count):
        prompt = chat(rng.choice(QUESTIONS) + " " * (i % 3))
        command = submit(f"r{i}", prompt, max_tokens, stop_token_ids=[1])
        known = {f: getattr(command.params, f) for f in command.params.__struct_fields__}
        params = type(command.params)(**known | {"seed": i} | FEATURES[feature])
        submits.append(Submit(command.request_id, prompt, params))
    return submits


def run(submits: list[Submit], **settings) -> Answers:
    return ModelDriver(SHIPPED, Settings(pages=600, page_size=16, **settings)).run(submits)


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
    answers = run(requests("plain", 8), drafter="mtp", num_drafts=1)
    assert answers.num_accepted > 0.7 * answers.num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_ids_do_not_depend_on_drafts(feature):
    same(feature, 4, [Settings(drafter="mtp", num_drafts=2), Settings(drafter="ngram")])


@pytest.mark.deep
@pytest.mark.parametrize("feature", FEATURES)
def test_500_prompts_with_every_number_of_drafts(feature):
    every = [Settings(drafter=d, num_drafts=k) for d in ("mtp", "ngram") for k in range(1, 8)]
    every += [dataclasses.replace(s, preempt_every=5) for s in every[::3]]
    same(feature, 500, every)


def same(feature: str, count: int, variants: list[Settings]) -> None:
    submits = requests(feature, count)
    plain = run(submits)
    for variant in variants:
        settings = dataclasses.replace(variant, pages=600, page_size=16)
        found = ModelDriver(SHIPPED, settings).run(submits)
        assert found.ids == plain.ids
        for request_id, scores in plain.logprobs.items():
            for mine, other in zip(scores, found.logprobs[request_id], strict=True):
                assert other.logprob == pytest.approx(mine.logprob, abs=1e-4)
