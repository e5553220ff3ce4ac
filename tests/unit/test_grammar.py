"""The matcher: what may come next, where a request may end, and drafts that leave no trace."""

import random

import pytest
import torch

from grammar_bed import (
    EOS,
    VOCAB,
    LegalRunner,
    control_id,
    ids_of,
    legal_ids,
    params,
    small_compiler,
    text_of,
    walk,
)
from minidsa.configs.engine import SchedulerConfig
from minidsa.kv_cache.cache import KvCache
from minidsa.model.sampler import sample
from minidsa.model.sequence import SampleInput
from minidsa.scheduler.admission import Refused
from minidsa.scheduler.grammar import GrammarCompiler, GrammarError
from minidsa.scheduler.launch import launch
from minidsa.scheduler.messages import RequestOutput, Submit
from minidsa.scheduler.speculative import Speculation
from minidsa.server import lark
from minidsa.server.json_schema import read_schema
from scheduler_fakes import PreemptingScheduler
from tokenizers_small import small_tokenizer

ANSWER = lark.json_text(
    read_schema(
        {
            "type": "object",
            "properties": {"result": {"type": "string", "maxLength": 12}},
            "required": ["result"],
        }
    )
)
THINK_END = control_id("</think>")
THINKING = f"start: THOUGHTS {lark.token(THINK_END)} answer\nanswer: {ANSWER}\nTHOUGHTS: " + (
    lark.text_without("</think>")
)
JSON = f"start: {ANSWER}"


def matcher(grammar: str, **fields):
    return small_compiler().compile(grammar, params(**fields))


def test_a_rule_that_leads_only_to_itself_is_told_in_words():
    m = matcher("start: start")
    m.mask()
    assert m.error is not None and m.error.endswith("a $ref may lead to nothing but itself")


def test_a_grammar_that_is_satisfied_may_end_and_one_that_admits_no_more_is_complete():
    m = matcher('start: "ab" "c"?')
    m.accept(ids_of("ab"))
    assert set(legal_ids(m.mask())) == {EOS, *ids_of("c")}
    assert not m.is_complete
    m.accept(ids_of("c"))
    assert m.is_complete and m.error is None


def test_a_token_that_is_not_legal_is_an_error_of_this_matcher_alone():
    m, other = matcher('start: "ab"'), matcher('start: "ab"')
    m.accept(ids_of("x"))
    assert m.error is not None and not m.is_complete
    assert legal_ids(m.mask()) == list(range(VOCAB))
    assert other.error is None
    assert legal_ids(other.mask()) != list(range(VOCAB))


def test_rollback_returns_to_the_very_place():
    rng = random.Random(0)
    m = matcher(JSON)
    masks = [m.mask()]
    ids: list[int] = []
    while not m.is_complete and len(ids) < 60:
        ids.append(rng.choice(legal_ids(m.mask())))
        m.accept(ids[-1:])
        masks.append(m.mask())
    for back in (1, 3, len(ids) - 4):
        m.rollback(back)
        del ids[len(ids) - back :], masks[len(masks) - back :]
        assert m.mask() == masks[-1]
    assert not ids


def test_what_is_legal_behind_drafts_is_what_is_legal_there_later():
    m, later = matcher(JSON), matcher(JSON)
    draft = ids_of('{"result": "x')
    before = m.mask()
    for count in range(len(draft) + 1):
        assert m.after(draft[:count]).mask() == later.mask()
        assert (
            m.after(draft[:1]).after(draft[1:count]).mask()
            == m.after(draft[: max(1, count)]).mask()
        )
        later.accept(draft[count : count + 1])
    assert m.mask() == before


@pytest.mark.parametrize(
    "draft", [[EOS], [THINK_END], ids_of("no"), ids_of('{"result": "" }z'), [300, EOS]]
)
def test_spec_07_drafts_outside_the_grammar_leave_no_trace(draft):
    m = matcher(JSON)
    before = m.mask()
    # Nothing is chosen behind such a draft, so every id may be.
    assert legal_ids(m.after(draft).mask()) == list(range(VOCAB))
    assert m.mask() == before and m.error is None


def test_stop_ids_are_legal_only_where_the_grammar_may_end():
    brace = ids_of("}")[0]
    m = matcher('start: "{" "}"* "!"?', stop_token_ids=[EOS, brace])
    assert not {EOS, brace} & set(legal_ids(m.mask()))
    m.accept(ids_of("{"))
    assert {EOS, brace, *ids_of("!")} == set(legal_ids(m.mask()))
    forced = matcher('start: "}"', stop_token_ids=[EOS, brace])
    assert legal_ids(forced.mask()) == [brace]


def test_min_tokens_holds_back_the_end_unless_nothing_else_may_come():
    m = matcher('start: "a"*', min_tokens=3)
    for _ in range(3):
        assert EOS not in legal_ids(m.mask())
        m.accept(ids_of("a"))
    assert EOS in legal_ids(m.mask())
    ignoring = matcher('start: "a"*', stop_token_ids=[])
    assert EOS not in legal_ids(ignoring.mask())


def test_control_tokens_have_no_place_in_text():
    text = set(legal_ids(matcher("start: /(?s:.)*/").mask()))
    assert not text & set(range(11)) - {EOS}
    thoughts = set(legal_ids(matcher(THINKING).mask()))
    assert thoughts & set(range(11)) == {THINK_END}


def test_the_end_of_thinking_cannot_be_spelled():
    m = matcher(THINKING)
    m.accept(ids_of("a </think"))
    assert ids_of(">")[0] not in legal_ids(m.mask())
    m.accept([*ids_of(" b"), THINK_END])
    assert text_of(legal_ids(m.mask())[:1]) in ("{", '{"')


def test_equal_grammars_are_compiled_once_and_do_not_share_a_state():
    first = matcher(JSON)
    first.accept(ids_of("{"))
    second = matcher(JSON)
    assert first.mask() != second.mask()
    for number in range(100):
        matcher(f'start: "{number}"')
    assert walk(matcher(JSON), 1)[1]


@pytest.mark.parametrize(
    "grammar", ["start: x", "start: /(a/", "nonsense", 'start: %json {"not": {}}']
)
def test_a_grammar_that_cannot_be_compiled_is_refused_in_one_line(grammar):
    with pytest.raises(GrammarError) as caught:
        matcher(grammar)
    text = str(caught.value)
    assert "\n" not in text and ".rs" not in text and len(text) <= 200


def test_a_vocabulary_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: No such file"):
        GrammarCompiler.from_directory(tmp_path, VOCAB, [EOS])
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        GrammarCompiler({"model": {"type": "none"}}, VOCAB, [EOS])


def test_the_sampler_obeys_the_mask_after_every_other_rule():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    only = ids_of("b")[0]
    plain = sample(logits, [SampleInput(params(temperature=0.0), [5], [])] * 4)
    for fields in (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0, "logit_bias": {plain[1]: 100.0, only: -100.0}},
        {"temperature": 0.5, "min_tokens": 9, "repetition_penalty": 2.0, "presence_penalty": 2.0},
    ):
        bound = SampleInput(params(**fields), [5], [], matcher('start: "b"'))
        free = SampleInput(params(temperature=0.0), [5], [])
        tokens = sample(logits, [free, bound, free, bound])
        assert tokens == [plain[0], only, plain[2], only]


class Oracle:
    """Drafts that are right up to a place that differs, and nonsense behind it."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers = answers

    def propose(self, request, most):
        done = len(request.output_ids)
        known = self._answers.get(request.request_id, [])[done : done + most]
        right = random.Random(f"{request.request_id} {done}").randint(0, len(known))
        return [*known[:right], *(EOS, THINK_END, 200)][:most]


def run(submits, depth=0, answers=None, preempt_every=0) -> dict[str, tuple[list[int], str | None]]:
    speculation = (
        Speculation(Oracle(answers or {}), depth, from_model=False, adaptive=False)
        if depth
        else None
    )
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256)
    cache = KvCache(600, 4)
    scheduler = PreemptingScheduler(limits, cache, 512, VOCAB, speculation, small_compiler())
    scheduler.every = preempt_every
    outputs: list[RequestOutput] = []
    for command in submits:
        scheduler.add(command)
    while step := scheduler.schedule():
        outputs += scheduler.commit(step, launch(LegalRunner(), step))
        scheduler.check()
    scheduler.check_idle()
    ends: dict[str, tuple[list[int], str | None]] = {}
    for output in outputs:
        ids, _ = ends.get(output.request_id, ([], None))
        ends[output.request_id] = ids + output.token_ids, output.finish_reason
    return ends


def submits(grammar: str | None, count: int, **fields) -> list[Submit]:
    fields = {"max_tokens": 90} | fields
    return [Submit(f"r{i}", [20 + i], params(seed=i, **fields), grammar) for i in range(count)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("grammar", [JSON, THINKING], ids=["json", "thinking"])
def test_spec_05_spec_06_drafts_and_preemption_change_no_token(grammar, depth):
    commands = submits(grammar, 6)
    plain = run(commands)
    answers = {name: ids for name, (ids, _) in plain.items()}
    assert run(commands, depth, answers) == plain
    assert run(commands, depth, answers, preempt_every=3) == plain
    assert run(commands, preempt_every=2) == plain
    assert {reason for _, reason in plain.values()} <= {"complete", "length"}
    assert "complete" in {reason for _, reason in plain.values()}
    for ids, reason in plain.values():
        if reason == "complete":
            *_, answer = text_of(ids).split("</think>")
            assert answer.startswith("{") and answer.endswith("}"), answer


def test_mates_of_a_bound_request_get_their_own_tokens():
    free = submits(None, 4, max_tokens=20)
    bound = [Submit("b", [40], params(seed=9), JSON)]
    alone = run(free)
    together = run([*free, *bound])
    assert {name: together[name] for name in alone} == alone


def test_a_matcher_that_meets_its_bounds_ends_its_own_request_alone():
    class Broken(GrammarCompiler):
        def compile(self, grammar, params):
            broken = super().compile(grammar, params)
            broken.accept(ids_of("x"))
            return broken

    compiler = small_compiler()
    broken = Broken.__new__(Broken)
    broken.__dict__ = compiler.__dict__
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256)
    scheduler = PreemptingScheduler(limits, KvCache(64, 4), 512, VOCAB, None, broken)
    scheduler.add(Submit("bad", [20], params(), JSON))
    scheduler.add(Submit("good", [20], params(max_tokens=5), None))
    outputs: list[RequestOutput] = []
    while step := scheduler.schedule():
        outputs += scheduler.commit(step, launch(LegalRunner(), step))
    scheduler.check_idle()
    (end,) = [o for o in outputs if o.request_id == "bad"]
    assert (end.token_ids, end.finish_reason, end.error_kind) == ([], "error", "invalid")
    assert "grammar" in (end.error or "")
    assert sum(len(o.token_ids) for o in outputs if o.request_id == "good") == 5


def test_an_engine_without_grammars_refuses_them():
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256)
    scheduler = PreemptingScheduler(limits, KvCache(64, 4), 512, VOCAB)
    with pytest.raises(Refused, match="cannot be used with grammars"):
        scheduler.add(Submit("a", [20], params(), JSON))
    with pytest.raises(Refused, match="the grammar cannot be used"):
        PreemptingScheduler(limits, KvCache(64, 4), 512, VOCAB, None, small_compiler()).add(
            Submit("a", [20], params(), "start: /(a/")
        )


def test_the_grammar_goes_before_a_minimum_length_and_ignored_ends():
    choice = "start: /red|green/"
    for fields in ({"min_tokens": 50}, {"stop_token_ids": []}):
        for ids, reason in run(submits(choice, 4, **fields)).values():
            assert text_of(ids) in ("red", "green") and reason == "complete"
    for ids, reason in run(submits("start: /[0-9]*/", 4, max_tokens=9, stop_token_ids=[])).values():
        assert text_of(ids).isdecimal() and (len(ids), reason) == (9, "length")


def test_a_thinking_budget_ends_bound_thoughts_between_characters():
    fields = {"temperature": 0.0, "thinking_budget": 1, "end_think_id": THINK_END}
    m = matcher(THINKING)
    half, rest = [small_tokenizer(VOCAB).encode_runs(["é"])[i] for i in (0, 1)]
    m.accept([half])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, rest] = 50.0
    assert sample(logits, [SampleInput(params(**fields), [5], [half], m)]) == [rest]
    m.accept([rest])
    assert sample(logits, [SampleInput(params(**fields), [5], [half, rest], m)]) == [THINK_END]
    m.accept([THINK_END])
    done = [half, rest, THINK_END]
    (token,) = sample(logits, [SampleInput(params(**fields), [5], done, m)])
    assert text_of([token])[0] in "{ \n\t\r"
