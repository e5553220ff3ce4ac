"""`minidsa generate` and the offline engine on the checkpoint that ships."""

import io

import pytest

from minidsa.configs.engine import CacheConfig, EngineConfig
from minidsa.configs.sampling import SamplingParams
from minidsa.scheduler import process
from minidsa.scheduler.offline import OfflineEngine
from minidsa.server.chat_formats import DeepseekV32
from minidsa.server.chat_messages import Message
from minidsa.server.cli import main
from minidsa.server.commands import EMBEDDED
from minidsa.server.tokenizer import Tokenizer
from scheduler_fakes import FakeTarget, expected

QUESTION = "What is the capital of Norway?"
FORMAT = ("--chat-format", "deepseek_v32")
# Not the two gigabytes that 64 requests of the longest kind would need.
SMALL = ("--num-threads", "1", "--set", "engine.cache.num_pages=64")


def generated(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["generate", *arguments, "--temperature", "0", *SMALL])
    return capsys.readouterr().out


def test_generate_writes_the_text_that_the_offline_engine_gives(capsys):
    config = EngineConfig(num_threads=1, cache=CacheConfig(num_pages=64))
    engine = OfflineEngine.load(EMBEDDED, Tokenizer.from_directory, config)
    params = SamplingParams(max_tokens=12, seed=0, temperature=0.0)
    (answer,) = engine.generate(["Once upon a time"], params)
    assert answer.text
    shown = generated(["Once upon a time", "--max-tokens", "12"], capsys)
    assert shown == answer.text + "\n"


@pytest.fixture
def modelless(monkeypatch):
    """An engine whose tokens are told by those before them."""
    monkeypatch.setattr(process, "_serve", FakeTarget(vocab_size=4096))


@pytest.mark.usefixtures("modelless")
def test_the_prompt_of_a_chat_comes_from_stdin(capsys, monkeypatch):
    """The newline that a shell puts behind it is no part of it."""
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    tokenizer = Tokenizer.from_directory(EMBEDDED)
    messages = [Message(role="user", content=QUESTION)]
    prompt = tokenizer.encode_runs(DeepseekV32().encode(messages, [], thinking=False))
    text = tokenizer.decode(expected(prompt, 12), skip_special_tokens=True)
    stop = text[len(text) // 2 :][:3]
    said = generated(["--chat", *FORMAT, "--max-tokens", "12", "--stop", stop], capsys)
    assert said == text[: text.index(stop)] + "\n"


@pytest.mark.usefixtures("modelless")
def test_a_chat_format_that_the_checkpoint_has_not_is_a_wrong_setting(capsys):
    """Refused once the engine has said what it would load."""
    with pytest.raises(SystemExit, match="2"):
        main(["generate", QUESTION, "--chat", "--chat-format", "jinja", *SMALL])
    assert "chat_format jinja: " in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "a\udcff"])
    assert "the prompt is not UTF-8 text" in capsys.readouterr().err
