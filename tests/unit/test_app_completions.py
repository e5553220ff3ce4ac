"""/v1/completions over a scripted engine: prompts, echo, logprobs, stops, choices, usage."""

import pytest

from minidsa.scheduler.messages import Submit
from scripted_engine import CONTEXT, EOS, VOCAB, serving
from sse_reader import both, join, post, stream, whole

PATH = "/v1/completions"
GREEDY = {"temperature": 0}


def spell(text: str, *ends: int):
    """A script whose model writes a text, byte by byte."""
    from tokenizers_small import small_tokenizer

    tokenizer = small_tokenizer(VOCAB)
    by_bytes = {tokenizer.token_bytes(i): i for i in range(VOCAB - 1, 10, -1)}
    ids = [by_bytes[bytes([byte])] for byte in text.encode()]
    return lambda submit: [*ids, *ends]


async def test_api_05_the_default_is_16_tokens():
    async with serving() as bed:
        for extra in ({}, {"max_tokens": None}):
            answer = (await post(bed, PATH, prompt="hi", **extra)).json()
            assert answer["usage"]["completion_tokens"] == 16
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["object"] == "text_completion"


async def test_api_06_ignore_eos_leaves_the_length_alone():
    async with serving(lambda submit: [EOS] * 9) as bed:
        (await post(bed, PATH, prompt="hi", max_tokens=5, ignore_eos=True)).raise_for_status()
        assert bed.engine.submits[0].params.stop_token_ids == []
        answer = (await post(bed, PATH, prompt="hi", max_tokens=5)).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["stop_reason"] is None


async def test_api_07_the_newer_limit_counts():
    async with serving() as bed:
        for fields, tokens in (
            ({"max_tokens": 3}, 3),
            ({"max_completion_tokens": 4}, 4),
            ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ):
            answer = (await post(bed, PATH, prompt="hi", **fields)).json()
            assert answer["usage"]["completion_tokens"] == tokens


async def test_api_09_choices_are_equal_at_temperature_0():
    async with serving() as bed:
        answers = await both(bed, PATH, prompt="hi", n=3, temperature=0, return_token_ids=True)
        assert answers[0] == answers[1] == answers[2]


async def test_http_20_choices_of_one_seed_differ_and_repeat():
    async with serving() as bed:
        first = await both(bed, PATH, prompt="hi", n=4, seed=5, return_token_ids=True)
        again = await both(bed, PATH, prompt="hi", n=4, seed=5, return_token_ids=True)
        alone = await both(bed, PATH, prompt="hi", seed=5, return_token_ids=True)
        assert first == again
        assert first[0] == alone[0]
        seeds = {submit.params.seed for submit in bed.engine.submits[:4]}
        assert len(seeds) == 4
        for seed in (2**63 - 1, -(2**63), -1, 0):
            assert (await post(bed, PATH, prompt="hi", n=4, seed=seed)).status_code == 200
        assert (await post(bed, PATH, prompt="hi", seed=2**64)).status_code == 400


async def test_a_request_without_a_seed_gets_one_and_the_server_seed_repeats_it():
    async def drawn() -> list[int]:
        async with serving() as bed:
            for _ in range(3):
                await post(bed, PATH, prompt="hi")
            return [submit.params.seed for submit in bed.engine.submits]

    first = await drawn()
    assert len(set(first)) == 3
    assert await drawn() == first


async def test_api_10_index_is_prompt_times_n_plus_choice():
    async with serving() as bed:
        prompts = [[20, 21], [22, 23, 24], [25]]
        answer = (await post(bed, PATH, prompt=prompts, n=2, return_token_ids=True)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for choice in answer["choices"]:
            assert choice["prompt_token_ids"] == prompts[choice["index"] // 2]
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 6 * 16


async def test_api_11_text_and_its_ids_are_one_prompt():
    async with serving() as bed:
        ids = (await post(bed, "/tokenize", prompt="hello wörld")).json()["tokens"]
        assert ids.count(0) == 1
        text = await both(bed, PATH, prompt="hello wörld", **GREEDY, return_token_ids=True)
        assert text == await both(bed, PATH, prompt=ids, **GREEDY, return_token_ids=True)
        assert bed.engine.submits[0].prompt_ids == ids
        await post(bed, PATH, prompt="hello wörld", add_special_tokens=False)
        assert bed.engine.submits[-1].prompt_ids == ids[1:]


async def test_api_12_lists_of_id_lists():
    async with serving() as bed:
        prompts = [[20] * length for length in (1, 7, 30)]
        answer = (await post(bed, PATH, prompt=prompts, max_tokens=1)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


async def test_api_13_the_empty_text_is_bos_alone():
    async with serving() as bed:
        assert (await post(bed, PATH, prompt="")).status_code == 200
        assert bed.engine.submits[0].prompt_ids == [0]
        refused = await post(bed, PATH, prompt="", add_special_tokens=False)
        assert refused.json()["error"]["param"] == "prompt"


async def test_api_14_scoring_a_prompt_of_ids():
    async with serving() as bed:
        prompt = [40, 41, 42, 43]
        for max_tokens in (1, 0):
            answers = await both(
                bed, PATH, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, n=2
            )
            logprobs = answers[0]["logprobs"]
            assert {len(values) for values in logprobs.values()} == {4 + max_tokens}
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["top_logprobs"][0] is None
            assert None not in logprobs["token_logprobs"][1:]
            text = answers[0]["content"]
            assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
            assert logprobs["text_offset"][-1] <= len(text)
            assert answers[0]["finish_reason"] == "length"


async def test_echo_with_text_shows_the_text_and_counts_from_its_start():
    async with serving(spell("xyz", EOS)) as bed:
        answers = await both(bed, PATH, prompt="hello", echo=True, logprobs=0, max_tokens=9)
        assert answers[0]["content"] == "helloxyz"
        logprobs = answers[0]["logprobs"]
        places = logprobs["text_offset"]
        tokens = logprobs["tokens"]
        assert tokens[0] == "<｜begin▁of▁sentence｜>"
        assert places[0] == places[1] == 0
        assert places[-4:] == [5, 6, 7, 8]
        for place, token in list(zip(places, tokens, strict=True))[1:-1]:
            assert "helloxyz"[place : place + len(token)] == token


async def test_max_tokens_0_needs_echo():
    async with serving() as bed:
        assert (await post(bed, PATH, prompt="hi", max_tokens=0)).status_code == 400
        answer = (await post(bed, PATH, prompt="hi", max_tokens=0, echo=True)).json()
        assert answer["choices"][0]["text"] == "hi"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_api_15_alternatives(count):
    async with serving() as bed:
        answers = await both(bed, PATH, prompt="hi", logprobs=count, max_tokens=3)
        logprobs = answers[0]["logprobs"]
        assert {len(values) for values in logprobs.values()} == {3}
        assert all(tops for tops in logprobs["top_logprobs"])
        if count == 0:
            assert all(len(tops) == 1 for tops in logprobs["top_logprobs"])
        assert (await post(bed, PATH, prompt="hi", logprobs=21)).status_code == 400


async def test_api_17_prompt_logprobs():
    async with serving() as bed:
        prompt = [40, 41, 42]
        answer = (await post(bed, PATH, prompt=prompt, prompt_logprobs=1)).json()
        scores = answer["choices"][0]["prompt_logprobs"]
        assert scores[0] is None and len(scores) == 3
        for token_id, entry in zip(prompt[1:], scores[1:], strict=True):
            assert entry[str(token_id)]["rank"] == 2
            assert entry[str(token_id + 1)]["rank"] == 1
            assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        refused = await post(bed, PATH, prompt=prompt, prompt_logprobs=1, stream=True)
        assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("burst", [1, 2, 3, 7])
async def test_http_11_everything_ends_at_the_stop(burst):
    async with serving(spell("abcdefgh"), burst=burst) as bed:
        answers = await both(
            bed, PATH, prompt="hi", stop="c", max_tokens=8, logprobs=0, return_token_ids=True
        )
        answer = answers[0]
        assert (answer["content"], answer["finish_reason"]) == ("ab", "stop")
        assert answer["stop_reason"] == "c"
        assert answer["ids"] == bed.ids("abc")
        assert answer["logprobs"]["tokens"] == ["a", "b", "c"]
        usage = (await post(bed, PATH, prompt="hi", stop="c", max_tokens=8)).json()["usage"]
        assert usage["completion_tokens"] == 3
        assert bed.engine.num_running == 0


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (",", "one", ","),
        (", t", "one", ", t"),
        ("two,", "one, ", "two,"),
        (["zzz", "wo"], "one, t", "wo"),
        (["two", "two, "], "one, ", "two"),
        ("three!", "one, two, three", None),
        ([], "one, two, three", None),
        (None, "one, two, three", None),
        ([str(i) for i in range(16)], "one, two, three", None),
    ],
)
@pytest.mark.parametrize("burst", [1, 4])
async def test_api_30_stop_strings(stop, text, reason, burst):
    async with serving(spell("one, two, three", EOS), burst=burst) as bed:
        answers = await both(bed, PATH, prompt="hi", stop=stop, max_tokens=99)
        assert answers[0]["content"] == text
        assert answers[0]["stop_reason"] == reason
        assert answers[0]["finish_reason"] == "stop"


async def test_api_32_the_match_can_be_kept():
    async with serving(spell("one, two", EOS)) as bed:
        for field in ("include_stop_str_in_output", "no_stop_trim"):
            answers = await both(bed, PATH, prompt="hi", stop=", ", **{field: True})
            assert answers[0]["content"] == "one, "


async def test_api_34_stop_ids():
    async with serving(lambda submit: [111, 112, 113, 114]) as bed:
        answers = await both(bed, PATH, prompt="hi", stop_token_ids=[113], return_token_ids=True)
        assert answers[0]["finish_reason"] == "stop"
        assert answers[0]["stop_reason"] == 113
        assert answers[0]["ids"] == [111, 112, 113]
        shown = bed.tokenizer.decode([111, 112])
        assert answers[0]["content"] == shown
        kept = await both(
            bed, PATH, prompt="hi", stop_token_ids=[113], include_stop_str_in_output=True
        )
        assert kept[0]["content"] == bed.tokenizer.decode([111, 112, 113])


async def test_min_tokens_holds_every_stop_back():
    async with serving(spell("abcabcabc", EOS)) as bed:
        answers = await both(bed, PATH, prompt="hi", stop="c", min_tokens=4)
        assert answers[0]["content"] == "abcab"
        assert bed.engine.submits[0].params.min_tokens == 4
        refused = await post(bed, PATH, prompt="hi", min_tokens=20)
        assert refused.json()["error"]["param"] == "min_tokens"


@pytest.mark.parametrize("text", ["😀 中文 é ü", "a😀b", "👩‍👩‍👧"])
@pytest.mark.parametrize("burst", [1, 2, 5])
async def test_http_09_characters_are_never_torn(text, burst):
    async with serving(spell(text, EOS), burst=burst) as bed:
        answers = await both(bed, PATH, prompt="hi", max_tokens=99, logprobs=0)
        assert answers[0]["content"] == text
        for chunk in await stream(bed, PATH, prompt="hi", max_tokens=99):
            assert "�" not in chunk["choices"][0]["text"]


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_http_09_a_cut_character_is_flushed_alike_in_both_forms(length):
    async with serving(spell("😀")) as bed:
        answers = await both(bed, PATH, prompt="hi", max_tokens=length)
        assert "�" in answers[0]["content"]


async def test_api_18_a_bias_reaches_the_sampler():
    async with serving() as bed:
        await post(bed, PATH, prompt="hi", logit_bias={"5": 100, "7": -1.5})
        assert bed.engine.submits[0].params.logit_bias == {5: 100.0, 7: -1.5}
        for key in ("abc", "512", "-1"):
            error = (await post(bed, PATH, prompt="hi", logit_bias={key: 1})).json()["error"]
            assert error["param"] == "logit_bias" and key in error["message"]


async def test_api_20_stop_ids_outside_the_vocabulary():
    async with serving() as bed:
        for token_id in (-1, VOCAB):
            refused = await post(bed, PATH, prompt="hi", stop_token_ids=[token_id])
            assert refused.json()["error"]["param"] == "stop_token_ids"


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40, 2**63])
async def test_api_58_prompt_ids_outside_the_vocabulary(token_id):
    async with serving() as bed:
        for prompt in ([token_id], [5, token_id], [[5], [token_id]]):
            refused = await post(bed, PATH, prompt=prompt)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "prompt"
        assert bed.engine.seen == []


async def test_api_28_best_of():
    async with serving() as bed:
        assert (await post(bed, PATH, prompt="hi", best_of=1)).status_code == 200
        assert (await post(bed, PATH, prompt="hi", best_of=2, n=2)).status_code == 200
        refused = await post(bed, PATH, prompt="hi", best_of=3)
        assert refused.json()["error"]["param"] == "best_of"


async def test_http_18_lengths_at_the_border():
    async with serving() as bed:
        assert (await post(bed, PATH, prompt=[5] * (CONTEXT - 1), max_tokens=1)).status_code == 200
        for fields in (
            {"prompt": [5] * CONTEXT},
            {"prompt": [5] * CONTEXT, "max_tokens": 1},
            {"prompt": [5] * (CONTEXT + 1), "max_tokens": 0, "echo": True},
            {"prompt": [5] * (CONTEXT - 4), "max_tokens": 5},
            {"prompt": "x" * 100_000},
            {"prompt": "x" * 3 * CONTEXT, "max_tokens": 5},
        ):
            error = (await post(bed, PATH, **fields)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
            assert error["param"] == "prompt"
        exact = await post(bed, PATH, prompt=[5] * CONTEXT, max_tokens=0, echo=True)
        assert exact.status_code == 200
        # Only the default is cut to what is left.
        answer = (await post(bed, PATH, prompt=[5] * (CONTEXT - 3))).json()
        assert answer["usage"]["completion_tokens"] == 3


async def test_abu_08_many_prompts_or_tokens_in_one_request():
    async with serving() as bed:
        for fields in (
            {"prompt": ["x"] * 10_000},
            {"prompt": ["x"] * 100, "n": 100},
            {"prompt": [[5] * 200] * 257},
        ):
            refused = await post(bed, PATH, **fields)
            assert refused.status_code == 400
        assert bed.engine.seen == []


async def test_api_42_echo_streams_the_prompt_once_per_index():
    async with serving(spell("xyz", EOS)) as bed:
        chunks = await stream(bed, PATH, prompt="hello", echo=True, n=2)
        assert {i: a["content"] for i, a in join(chunks).items()} == {0: "helloxyz", 1: "helloxyz"}


async def test_fill_in_the_middle():
    async with serving() as bed:
        answer = (await post(bed, PATH, prompt="ab", suffix="cd", echo=True)).json()
        assert answer["choices"][0]["text"].startswith("ab")
        control = bed.tokenizer.control
        expected = [
            0, control["<｜fim▁begin｜>"], *bed.ids("ab"), control["<｜fim▁hole｜>"],
            *bed.ids("cd"), control["<｜fim▁end｜>"],
        ]  # fmt: skip
        assert bed.engine.submits[0].prompt_ids == expected
        assert (await post(bed, PATH, prompt="ab", suffix="")).status_code == 200
        assert (await post(bed, PATH, prompt=[5], suffix="x")).status_code == 400


async def test_continuous_usage_grows():
    async with serving() as bed:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await stream(bed, PATH, prompt="hi", max_tokens=4, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 4


async def test_hidden_and_shown_special_tokens():
    async with serving(lambda submit: [2, *(115,) * 2, EOS]) as bed:
        hidden = await both(bed, PATH, prompt="hi", ignore_eos=True, max_tokens=3)
        shown = await both(
            bed, PATH, prompt="hi", ignore_eos=True, max_tokens=3, skip_special_tokens=False
        )
        assert shown[0]["content"] == bed.tokenizer.token_text(2) + hidden[0]["content"]


async def test_minus_infinity_is_written_as_a_number():
    from minidsa.scheduler.messages import TokenLogprobs
    from minidsa.server.logprobs import chat_logprobs, completion_logprobs
    from tokenizers_small import small_tokenizer

    entry = TokenLogprobs(float("-inf"), 3, [5], [float("-inf")])
    shape = completion_logprobs(small_tokenizer(), [7], [entry], [0])
    assert shape.token_logprobs == [-9999.0]
    chat = chat_logprobs(small_tokenizer(), [7], [entry])
    assert chat.content[0].logprob == chat.content[0].top_logprobs[0].logprob == -9999.0


async def test_whole_reads_what_join_reads():
    async with serving() as bed:
        answer = (await post(bed, PATH, prompt="hi")).json()
        assert whole(answer)[0]["content"] == answer["choices"][0]["text"]
        assert isinstance(bed.engine.submits[0], Submit)
