"""The text files of a checkpoint: what is wrong with one is told by file and key."""

import json
from pathlib import Path

import pytest

from minidsa.configs.engine_info import StartPlan
from minidsa.configs.setting_error import SettingError
from minidsa.model.small_tokenizer import write_tokenizer
from minidsa.server.sampling import SamplingDefaults
from minidsa.server.text_side import TextFiles, TextSide

PLAN = StartPlan("deepseek_v32", 512, [])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 512)
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)


def refusal(folder: Path, plan: StartPlan = PLAN) -> str:
    with pytest.raises(ValueError, match="json: ") as caught:
        TextSide.fit(TextFiles.read(folder), plan)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_files_that_fit(folder):
    write(folder, "generation_config.json", {"temperature": 0.5, "top_p": None, "max_length": 3})
    side = TextSide.fit(TextFiles.read(folder), PLAN)
    assert side.defaults == SamplingDefaults(temperature=0.5)
    assert "temperature 0.5" in side.notes[0]
    assert side.chat_format is not None and side.chat_format.name == "deepseek_v32"


def test_http_02_the_chat_format_that_is_asked_for(folder):
    other = StartPlan("deepseek_v3", 512, [])
    files = TextFiles.read(folder)
    assert TextSide.fit(files, other).chat_format is None
    side = TextSide.fit(files, other, "deepseek_v32")
    assert side.chat_format is not None and side.chat_format.name == "deepseek_v32"
    assert "warning: deepseek_v3 was not trained on this format" in side.notes
    with pytest.raises(SettingError, match="jinja: the checkpoint has no chat template"):
        TextSide.fit(files, other, "jinja")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"temperature": "hot"}, ["temperature", "'hot'"]),
        ({"temperature": [0.5]}, ["temperature", "[0.5]"]),
        ({"top_p": 0}, ["top_p", "0"]),
        ({"top_k": 2.5}, ["top_k", "2.5"]),
        ({"top_k": True}, ["top_k", "True"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "0"]),
        ('{"temperature": NaN}', ["JSON"]),
        ("[1]", ["JSON object"]),
        ("{", ["JSON object"]),
        ("", ["JSON object"]),
    ],
)
def test_bad_sampling_defaults_are_named_in_our_words(folder, content, words):
    write(folder, "generation_config.json", content)
    message = refusal(folder)
    assert message.startswith("generation_config.json: ")
    assert all(word in message for word in words)
    for foreign in ("pydantic", "validation error", "GenerationRequest", "input_value", "http"):
        assert foreign not in message


def test_a_tokenizer_larger_than_the_vocabulary_names_both_files(folder):
    message = refusal(folder, StartPlan("deepseek_v32", 300, []))
    assert "tokenizer.json" in message and "config.json has vocab_size = 300" in message


@pytest.mark.parametrize(
    "template", [3, {"default": "x"}, [{"name": "default"}], [["default", "x"]], [3]]
)
def test_a_chat_template_of_another_shape_is_named(folder, template):
    write(folder, "tokenizer_config.json", {"chat_template": template})
    assert refusal(folder).startswith("tokenizer_config.json: chat_template")


def test_a_missing_or_broken_tokenizer_is_named(folder):
    for content in ("{", "{}", "[]"):
        write(folder, "tokenizer.json", content)
        assert refusal(folder).startswith("tokenizer.json: ")
    (folder / "tokenizer.json").unlink()
    assert refusal(folder).startswith("tokenizer.json: no such file")
