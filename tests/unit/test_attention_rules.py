"""`attention` and `index_topk` of one request: held against the oracle, beside others without."""

import json
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import oracle
from checkpoints import T_SERVED, t_cpu, t_tied_dense
from minidsa.configs.engine import CacheConfig, EngineConfig, SpeculativeConfig
from minidsa.configs.sampling import AttentionRule, SamplingParams
from minidsa.scheduler.offline import Generated, OfflineEngine
from scripted_engine import INFO, serving

IDS = [(7 * i * i + 3 * i + 1) % 512 for i in range(90)]
RULES = (
    None,
    AttentionRule("dense"),
    AttentionRule("sparse", 5),
    AttentionRule(index_topk=3),
    AttentionRule("sparse"),
    AttentionRule(index_topk=16),
)


def engine(method: Any) -> OfflineEngine:
    config = EngineConfig(
        num_threads=1,
        cache=CacheConfig(num_pages=200, page_size=8),
        speculative=SpeculativeConfig(method=method, adaptive=False),
    )
    return OfflineEngine.load(t_cpu(), config=config)


def params(rule: AttentionRule | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=10, seed=0, temperature=0.0, logprobs=0, prompt_logprobs=0, attention=rule
    )


def scores(answer: Generated) -> torch.Tensor:
    return torch.tensor([s.logprob for s in (*answer.prompt_logprobs, *answer.logprobs)])


def truth(answer: Generated, rule: AttentionRule | None) -> torch.Tensor:
    tensors = load_file(t_cpu() / "model.safetensors")
    topk = T_SERVED["index_topk"]
    if rule is not None:
        topk = 10**6 if rule.mode == "dense" else rule.index_topk or topk
    ids = answer.prompt_ids + answer.token_ids
    logits = oracle.run(tensors, dict(T_SERVED) | {"index_topk": topk}, ids[:-1]).logits
    return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("method", ["none", "mtp"])
def test_each_request_attends_by_its_own_rule(method):
    """Twice, so that cached rows are used; all at once, so that rules share steps."""
    loaded = engine(method)
    answers: list[Generated] = []
    for _ in range(2):
        answers = loaded.generate(
            [IDS] * len(RULES), [params(rule) for rule in RULES], ignore_eos=True
        )
        for rule, answer in zip(RULES, answers, strict=True):
            close = torch.isclose(scores(answer), truth(answer, rule), atol=1e-4, rtol=0)
            assert close.all(), rule
    plain, dense, five, three, sparse, sixteen = map(scores, answers)
    # What is no change is none, to the last bit, and what is one shows.
    assert torch.equal(plain, sparse) and torch.equal(plain, sixteen)
    for other in (dense, five, three):
        assert not torch.allclose(plain, other, atol=1e-3)
    alone = engine("none").generate([IDS], params(RULES[2]), ignore_eos=True)
    assert torch.equal(scores(alone[0]), five)


def test_a_model_without_an_indexer_has_no_rules():
    loaded = OfflineEngine.load(t_tied_dense(), config=EngineConfig(num_threads=1))
    assert loaded.info.index_topk is None
    with pytest.raises(ValueError, match="needs a model with an indexer"):
        loaded.generate([[1, 2]], params(AttentionRule("dense")))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"attention": None, "index_topk": None}, None),
        ({"attention": "dense"}, AttentionRule("dense")),
        ({"attention": "sparse", "index_topk": 64}, AttentionRule("sparse", 64)),
        ({"index_topk": 1}, AttentionRule("auto", 1)),
    ],
)
async def test_the_fields_reach_the_engine(fields, expected):
    async with serving() as bed:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = await bed.client.post(path, json=body | {"max_tokens": 2} | fields)
            assert answer.status_code == 200
            assert bed.engine.submits[-1].params.attention == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"attention": "full"}, "attention"),
        ({"attention": True}, "attention"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_topk": 65}, "index_topk"),
        ({"index_topk": "8"}, "index_topk"),
        ({"attention": "dense", "index_topk": 8}, "index_topk"),
    ],
)
async def test_what_no_rule_says_is_refused_by_name(fields, param):
    async with serving() as bed:
        answer = await bed.client.post("/v1/completions", json={"prompt": "a"} | fields)
        assert answer.status_code == 400
        assert json.loads(answer.content)["error"]["param"] == param


async def test_a_served_model_without_an_indexer_refuses_them():
    async with serving(info=msgspec.structs.replace(INFO, index_topk=None)) as bed:
        answer = await bed.client.post(
            "/v1/completions", json={"prompt": "a", "attention": "dense"}
        )
        assert answer.status_code == 400
        assert "needs a model with an indexer" in answer.text
