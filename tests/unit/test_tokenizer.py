"""Text to ids: control tokens only where the server put them, and equal to a plain encode."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidsa.model.small_tokenizer import (
    CONTROL_TOKENS,
    SMALLEST_VOCABULARY,
    build_small_tokenizer,
    write_tokenizer,
)
from minidsa.server.prompt_runs import Control, join_runs, prompt_text
from minidsa.server.tokenizer import Tokenizer
from minidsa.server.tokenizer_files import TokenizerSettings, read_json
from tokenizers_small import (
    BOS,
    EOS,
    byte_fallback_tokenizer,
    small_tokenizer,
    write_files,
)

LITERALS = [name for name, _ in CONTROL_TOKENS]
controls = st.sampled_from(LITERALS).map(Control)
# Text near the borders that matter: punctuation, newlines, spaces, digits, several scripts.
plain_texts = st.text(alphabet="ab .,\n\t0129é你🙂{}#", max_size=12)
hostile_texts = st.lists(plain_texts | st.sampled_from(LITERALS), max_size=4).map("".join)


def description() -> dict:
    return json.loads(build_small_tokenizer(512).to_str())


def test_the_small_tokenizer_is_the_same_everywhere():
    first, second = build_small_tokenizer(400), build_small_tokenizer(400)
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 400
    assert build_small_tokenizer(4096).get_vocab_size() < 4096
    added = first.get_added_tokens_decoder()
    assert [(added[i].content, added[i].special) for i in sorted(added)] == list(CONTROL_TOKENS)


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(ValueError, match="needs 267"):
        build_small_tokenizer(SMALLEST_VOCABULARY - 1)


def test_written_files_read_back(tmp_path):
    write_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (300, 0, (1,))


def test_ids_of_the_generation_config_win(tmp_path):
    write_tokenizer(tmp_path, 300)
    write_files(tmp_path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [1, 9]})
    assert Tokenizer.from_directory(tmp_path).eos_ids == (1, 9)


def test_tokens_stored_as_tables_are_read(tmp_path):
    write_files(tmp_path, tokenizer=description(), tokenizer_config={"bos_token": {"content": BOS}})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, ())


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "NoSuchModel"}}'])
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)


def test_missing_control_tokens_are_listed_together():
    with pytest.raises(ValueError, match=r"<a>, <b>$"):
        small_tokenizer().control_ids(["<a>", "<think>", "<b>"])


def test_a_vocabulary_too_large_for_the_model_is_told():
    small_tokenizer().check_vocab(512)
    with pytest.raises(ValueError, match=r"tokenizer.json: ids go up to 511, .* vocab_size = 511"):
        small_tokenizer().check_vocab(511)


def test_api_11_bos_comes_once():
    tokenizer = small_tokenizer()
    ids = tokenizer.encode_text("a")
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.encode_text(BOS + "a") == ids
    assert tokenizer.encode_text("a", add_bos=False) == ids[1:]
    assert tokenizer.encode_text("") == [tokenizer.bos_id]
    assert tokenizer.encode_text("", add_bos=False) == []


def test_control_literals_of_completions_prompts_are_parsed():
    tokenizer = small_tokenizer()
    assert tokenizer.encode_text("".join(LITERALS)) == list(range(len(LITERALS)))


@given(st.lists(controls | plain_texts, max_size=8))
def test_api_73_runs_encode_as_the_whole_string_does(parts):
    runs = join_runs(parts)
    tokenizer = small_tokenizer()
    assert tokenizer.encode_runs(parts) == tokenizer.encode_text(prompt_text(runs), add_bos=False)


@given(st.lists(controls | hostile_texts, max_size=8))
def test_text_never_becomes_a_control_token(parts):
    tokenizer = small_tokenizer()
    ids = tokenizer.encode_runs(parts)
    wanted = [tokenizer.control[part.literal] for part in parts if isinstance(part, Control)]
    assert [i for i in ids if i in tokenizer.control.values()] == wanted
    assert tokenizer.decode(ids) == prompt_text(parts)


def test_a_model_that_knows_the_literals_as_whole_words_keeps_them_text_too():
    """With `ignore_merges` a word that is an entry of the vocabulary becomes that entry."""
    whole_words = description()
    whole_words["model"]["ignore_merges"] = True
    as_bytes = whole_words["pre_tokenizer"]["pretokenizers"][-1]
    whole_words["pre_tokenizer"] = as_bytes
    tokenizer = Tokenizer(whole_words, TokenizerSettings())
    assert tokenizer.control["<think>"] not in tokenizer.encode_runs(["<think>"])
    assert tokenizer.encode_runs([Control("<think>")]) == [tokenizer.control["<think>"]]


@given(st.text())
def test_token_bytes_joined_are_the_text(text):
    tokenizer = small_tokenizer()
    ids = tokenizer.encode_text(text, add_bos=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


def test_http_10_every_token_shows_its_bytes():
    for tokenizer in (small_tokenizer(), byte_fallback_tokenizer()):
        for token_id in range(tokenizer.vocab_size):
            shown = tokenizer.token_bytes(token_id).decode(errors="replace")
            assert shown == tokenizer.token_text(token_id)


def test_padding_ids_of_the_model_show_nothing():
    assert small_tokenizer().token_bytes(600) == b""
    assert small_tokenizer().token_text(600) == ""
    assert small_tokenizer().decode([600]) == ""


def test_special_tokens_are_skipped_by_their_flag():
    tokenizer = small_tokenizer()
    ids = tokenizer.control_ids(["｜DSML｜", "</think>", EOS])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "</think>"
    assert tokenizer.decode(ids) == "｜DSML｜</think>" + EOS


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_abu_12_a_lone_surrogate_is_a_clear_error(text):
    for encode in (small_tokenizer().encode_text, lambda t: small_tokenizer().encode_runs([t])):
        with pytest.raises(ValueError, match="lone surrogate"):
            encode(text)


@pytest.mark.parametrize("text", ["\0", "a\0b", "\x7f", "\ufeffa", "\uffff"])
def test_abu_12_odd_characters_survive(text):
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode_runs([text])) == text


@given(st.text(alphabet="a <>th\n", max_size=60))
def test_abu_09_the_length_bound_never_refuses_what_fits(text):
    tokenizer = small_tokenizer()
    assert tokenizer.could_fit(len(text), len(tokenizer.encode_text(text, add_bos=False)))


def test_abu_09_a_hopeless_prompt_is_known_before_encoding():
    assert not small_tokenizer().could_fit(1_000_000, 512)
    assert byte_fallback_tokenizer().could_fit(1_000_000, 512)


def test_a_folder_that_is_not_there_is_told_as_that(tmp_path):
    with pytest.raises(ValueError, match="away: no such folder"):
        read_json(tmp_path / "away" / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file in the checkpoint"):
        read_json(tmp_path / "tokenizer.json")
