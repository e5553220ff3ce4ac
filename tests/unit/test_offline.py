"""The engine without a server: the tokens of the server's engine, for scripts."""

import math

import pytest
from msgspec import structs

from checkpoints import t_cpu
from minidsa.configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from minidsa.configs.sampling import AttentionRule, SamplingParams
from minidsa.scheduler.offline import GenerationFailed, OfflineEngine
from minidsa.scheduler.worker import new_scheduler
from scheduler_fakes import VOCAB, FakeTarget, Plan, expected

GREEDY = SamplingParams(max_tokens=6, seed=0, temperature=0.0)


class Letters:
    """A tokenizer of one id a letter."""

    def encode_text(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(f"<{token}>" for token in ids)


def fake_engine(plan: Plan | None = None, text: Letters | None = None, **scheduling):
    config = EngineConfig(scheduler=SchedulerConfig(**scheduling))
    loaded = FakeTarget(plan or Plan()).load(config)
    scheduler = new_scheduler(config, loaded.info, loaded.kv_cache)
    return OfflineEngine(loaded.runner, scheduler, loaded.info, text)


def test_answers_come_in_the_order_of_the_prompts():
    prompts = [[i + 1] * (i + 1) for i in range(9)]
    engine = fake_engine(max_num_seqs=2, max_queue=1)
    answers = engine.generate(prompts, GREEDY, ignore_eos=True)
    assert [answer.token_ids for answer in answers] == [expected(p, 6) for p in prompts]
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert engine.generate([], GREEDY) == []


def test_each_prompt_may_have_parameters_of_its_own():
    params = [GREEDY, replace_params(max_tokens=2, logprobs=3, prompt_logprobs=1)]
    first, second = fake_engine().generate([[5, 6], [7, 8, 9]], params, ignore_eos=True)
    assert len(first.token_ids) == 6 and not first.logprobs
    assert len(second.token_ids) == len(second.logprobs) == len(second.prompt_logprobs) == 2
    assert second.logprobs[0].top_ids == [0, 1, 2]
    with pytest.raises(ValueError, match="3 prompts and 2"):
        fake_engine().generate([[1], [2], [3]], params)


def replace_params(**changes) -> SamplingParams:
    return SamplingParams(**{"seed": 0, "temperature": 0.0} | changes)


def test_text_goes_in_and_comes_out():
    (answer,) = fake_engine(text=Letters()).generate(["ab"], GREEDY, ignore_eos=True)
    assert answer.prompt_ids == [97, 98]
    assert answer.text == "".join(f"<{token}>" for token in expected([97, 98], 6))
    with pytest.raises(ValueError, match="without a tokenizer"):
        fake_engine().generate(["ab"], GREEDY)


def test_eos_and_stop_ids_end_an_answer():
    ids = expected([3, 4], 6)
    engine = fake_engine()
    engine.info = structs.replace(engine.info, eos_token_ids=[ids[1]])
    (answer,) = engine.generate([[3, 4]], GREEDY)
    assert (answer.token_ids, answer.finish_reason) == (ids[:2], "stop")
    (answer,) = engine.generate([[3, 4]], GREEDY, ignore_eos=True)
    assert answer.token_ids == ids
    stop = replace_params(max_tokens=6, stop_token_ids=[ids[3]])
    (answer,) = engine.generate([[3, 4]], stop, ignore_eos=True)
    assert answer.token_ids == ids[:4]


def test_a_failure_names_its_prompt_and_leaves_the_engine_alive():
    poisoned = fake_engine(Plan(poison_token=9))
    with pytest.raises(GenerationFailed, match="1 prompts failed; prompt 1: "):
        poisoned.generate([[1, 2], [9, 9]], GREEDY, ignore_eos=True)
    (answer,) = poisoned.generate([[1, 2]], GREEDY, ignore_eos=True)
    assert answer.token_ids == expected([1, 2], 6)


def test_nothing_is_left_behind_by_what_cannot_be_served():
    engine = fake_engine(Plan(fail_steps=frozenset({8})))
    with pytest.raises(ValueError, match=r"prompt 1: .*the request names ids"):
        engine.generate([[1, 2], [VOCAB]], GREEDY)
    engine.generate([[1, 2]], GREEDY, ignore_eos=True)
    with pytest.raises(RuntimeError, match="planned failure"):
        engine.generate([[1, 2]] * 3, GREEDY, ignore_eos=True)
    (answer,) = engine.generate([[1, 2]], GREEDY, ignore_eos=True)
    assert answer.token_ids == expected([1, 2], 6)


WRONG = [
    ("temperature", -0.5), ("temperature", float("nan")), ("temperature", "1"), ("top_p", 0.0),
    ("top_p", 1.5), ("top_k", -1), ("top_k", 1.0), ("min_p", 2), ("presence_penalty", 3),
    ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("max_tokens", -1),
    ("max_tokens", 2.0), ("max_tokens", True), ("seed", 2**64), ("seed", None), ("min_tokens", 99),
    ("stop_token_ids", [VOCAB]), ("stop_token_ids", [1.0]), ("stop_token_ids", 5),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101}), ("logit_bias", [1]), ("logprobs", -1),
    ("logprobs", VOCAB + 1), ("prompt_logprobs", True), ("thinking_budget", 0),
    ("attention", AttentionRule("dense")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_parameters_are_refused_by_place_and_field(name, value):
    engine = fake_engine()
    wrong = replace_params(**{"max_tokens": 6, name: value})
    with pytest.raises(ValueError, match=rf"^prompt 1: {name}") as error:
        engine.generate([[1, 2], [3]], [GREEDY, wrong], ignore_eos=True)
    assert "\n" not in str(error.value)
    assert engine._scheduler.stats().num_steps == 0


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1.0, 2.0], "its ids must be int, not 1.0"),
        ([True], "its ids must be int, not True"),
        (["a"], "its ids must be int, not 'a'"),
        ([], "the prompt holds no tokens"),
        ([1] * 200, "the prompt holds 200 tokens; at most 128 fit"),
        (5, "it must be a text or a list of ids, not 5"),
        (b"ab", "it must be a text or a list of ids"),
        (None, "it must be a text or a list of ids"),
    ],
)
def test_impossible_prompts_are_refused_by_their_place(prompt, words):
    engine = fake_engine()
    with pytest.raises(ValueError, match=f"^prompt 2: {words}"):
        engine.generate([[1], [2], prompt], GREEDY, ignore_eos=True)
    with pytest.raises(ValueError, match="prompts is one text"):
        engine.generate("one prompt", GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt 0: params must be SamplingParams"):
        engine.generate([[1]], [{"max_tokens": 3}])  # type: ignore[list-item]


@pytest.mark.parametrize("topk", [0, 17])
def test_a_rule_of_attention_that_no_layer_can_follow_is_refused(topk):
    engine = OfflineEngine.load(t_cpu(), config=EngineConfig(device="cpu", num_threads=1))
    params = SamplingParams(max_tokens=2, seed=0, attention=AttentionRule("sparse", topk))
    with pytest.raises(ValueError, match=rf"index_topk is {topk}; it must be from 1 to 16"):
        engine.generate([[1, 2]], params)


def test_a_checkpoint_is_loaded_and_its_batch_agrees_with_single_prompts():
    config = EngineConfig(num_threads=1, cache=CacheConfig(num_pages=64))
    engine = OfflineEngine.load(t_cpu(), config=config)
    params = replace_params(max_tokens=12, logprobs=2, prompt_logprobs=0)
    prompts = [[0, 5, 9], list(range(30, 60)), [0]]
    together = engine.generate(prompts, params, ignore_eos=True)
    alone = [engine.generate([prompt], params, ignore_eos=True)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids and len(one.token_ids) == 12
        assert one.logprobs == other.logprobs
        assert all(math.isfinite(score.logprob) for score in one.logprobs)
        assert len(one.prompt_logprobs) == len(one.prompt_ids) - 1
