"""Streamed text equals the full decode, and no torn character is shown on the way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidsa.server.detokenizer import Detokenizer
from tokenizers_small import byte_fallback_tokenizer, small_tokenizer

EMOJI = "🙂"


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """Ids of single-byte tokens, as a model with a byte vocabulary emits them."""
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [ids[bytes([byte])] for byte in data]


def streamed(tokenizer, ids, **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.flush()]


@pytest.fixture(params=[small_tokenizer, byte_fallback_tokenizer], ids=["bytes", "fallback"])
def tokenizer(request):
    return request.param()


@given(st.lists(st.integers(0, 511), max_size=40), st.booleans())
def test_streamed_text_is_the_full_decode(ids, skip):
    tokenizer = small_tokenizer()
    deltas = streamed(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text())
def test_api_40_valid_text_never_shows_a_replacement(text):
    tokenizer = small_tokenizer()
    deltas = streamed(tokenizer, byte_ids(tokenizer, text.encode()))
    assert "".join(deltas) == text
    assert deltas[-1] == ""
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@given(st.text(alphabet="ab é你🙂", max_size=20))
def test_api_40_holds_for_other_tokenizers(text):
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode_text(text, add_bos=False)
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == text
    assert "\ufffd" not in "".join(deltas)


def test_http_09_an_emoji_comes_whole(tokenizer):
    ids = byte_ids(tokenizer, ("a" + EMOJI + "b").encode())
    assert [delta for delta in streamed(tokenizer, ids) if delta] == ["a", EMOJI, "b"]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_http_09_a_cut_emoji_is_flushed_as_the_full_decode(tokenizer, num_bytes):
    ids = byte_ids(tokenizer, ("a" + EMOJI).encode()[: 1 + num_bytes])
    deltas = streamed(tokenizer, ids)
    assert deltas[:-1] == ["a"] + [""] * num_bytes
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "\ufffd" in deltas[-1]


def test_a_character_begun_by_the_prompt_is_completed():
    tokenizer = small_tokenizer()
    ids = byte_ids(tokenizer, EMOJI.encode())
    assert streamed(tokenizer, ids[2:], prompt_tail=ids[:2]) == ["", EMOJI, ""]


def test_nothing_pushed_shows_nothing():
    tokenizer = small_tokenizer()
    tail = byte_ids(tokenizer, EMOJI.encode())[:2]
    assert streamed(tokenizer, [], prompt_tail=tail) == [""]


def test_endless_invalid_bytes_are_not_held_back():
    tokenizer = small_tokenizer()
    deltas = streamed(tokenizer, byte_ids(tokenizer, b"\x80" * 100))
    assert deltas[:-1] == ["\ufffd"] * 100


def test_kept_special_tokens_stay_for_the_parser():
    tokenizer = small_tokenizer()
    dsml, eos = tokenizer.control_ids(["｜DSML｜", "<｜end▁of▁sentence｜>"])
    kept = streamed(tokenizer, [dsml, eos], skip_special_tokens=True, keep=[dsml])
    assert kept == ["｜DSML｜", "", ""]


def test_places_in_the_text_find_their_tokens():
    tokenizer = small_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(byte_ids(tokenizer, ("a" + EMOJI + "bc").encode()))
    assert detokenizer.token_ends == [1, 1, 1, 1, 2, 3, 4]
    assert [detokenizer.tokens_through(n) for n in range(6)] == [0, 1, 5, 6, 7, 7]


def test_flushed_text_belongs_to_the_last_token():
    tokenizer = small_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(byte_ids(tokenizer, ("a" + EMOJI).encode()[:3]))
    detokenizer.flush()
    assert detokenizer.token_ends == [1, 1, 2]
    assert detokenizer.tokens_through(2) == 3
