"""Settings: flags before file before defaults; every mistake is one line that names it."""

import argparse
import json

import pytest

from minidsa.server.cli import main
from minidsa.server.commands import KNOWN_FLAGS, _parser
from minidsa.server.flag_table import FLAGS, GROUPS
from minidsa.server.flags import (
    SERVE_FLAGS,
    OneLineParser,
    UsageError,
    add_flags,
    choices_of,
    read_settings,
    refuse_unknown,
)
from minidsa.server.offline_commands import unused_settings
from public_configs import MOONLIGHT


def settings(*arguments: str, environment: dict[str, str] | None = None):
    parser = OneLineParser(prog="serve", allow_abbrev=False)
    parser.add_argument("model", nargs="?")
    add_flags(parser)
    parsed, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown, SERVE_FLAGS)
    return read_settings(parsed, environment or {})


def test_defaults():
    config = settings()
    assert (config.host, config.port, config.engine.model) == ("127.0.0.1", 8000, "")
    assert config.api_key is None


def test_named_flags_reach_their_settings():
    config = settings(
        "folder", "--port", "9", "--max-num-seqs", "3", "--max-num-batched-tokens=64",
        "--dtype", "float32", "--seed", "7", "--served-model-name", "123",
        "--chat-format", "jinja",
    )  # fmt: skip
    assert config.engine.model == "folder"
    assert (config.port, config.served_model_name) == (9, "123")
    assert config.chat_format == "jinja"
    assert config.engine.scheduler.max_num_seqs == 3
    assert config.engine.scheduler.max_num_batched_tokens == 64
    assert (config.engine.dtype, config.engine.seed) == ("float32", 7)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "serving.toml"
    file.write_text('port = 1\nhost = "0.0.0.0"\n[engine.cache]\npage_size = 4\n')
    config = settings("--config", str(file), "--port", "2", "--set", "engine.cache.num_pages=9")
    assert (config.port, config.host) == (2, "0.0.0.0")
    assert (config.engine.cache.page_size, config.engine.cache.num_pages) == (4, 9)


def test_nothing_need_be_stored():
    assert settings("--set", "limits.max_stored_bytes=0").limits.max_stored_bytes == 0


def test_set_reaches_every_setting():
    config = settings("--set", "drain_seconds=1.5", "--set", "limits.max_body_bytes=99")
    assert (config.drain_seconds, config.limits.max_body_bytes) == (1.5, 99)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prot", "1"], ["--prot", "--port"]),
        (["--max-num-seq", "1"], ["--max-num-seq", "--max-num-seqs"]),
        (["--set", "engine.cache.pagesize=1"], ["engine.cache.pagesize", "engine.cache.page_size"]),
        (["--set", "page_size=1"], ["page_size", "engine.cache.page_size"]),
        (["--set", "engine.cache=1"], ["engine.cache is a section"]),
        (["--set", "port.x=1"], ["port"]),
        (["--set", "port"], ["SECTION.FIELD=VALUE"]),
        (["--set", "engine.schedular.max_queue=1"], ["did you mean engine.scheduler?"]),
        (["--set", "engine.dtype.x=1"], ["engine.dtype is a value"]),
        (["--port", "many"], ["--port is 'many'; it must be a whole number"]),
        (["--port", "1.5"], ["--port is '1.5'; it must be a whole number"]),
        (["--max-model-len", "long"], ["--max-model-len is 'long'", "a whole number"]),
        (["--drain-seconds", "x"], ["--drain-seconds is 'x'; it must be a number"]),
        (["--speculative", "x"], ["--speculative is 'x'; it must be one of auto, none, mtp"]),
        (["--set", "engine.dtype=x"], ["engine.dtype is 'x'; it must be one of"]),
        (["--set", "engine.speculative.num_tokens=x"], ["engine.speculative.num_tokens is 'x'"]),
        (["--port", "70000"], ["port", "65535"]),
        (["--port"], ["--port"]),
        (["--port", "1", "--port", "2"], ["--port", "twice"]),
        (["--drain-seconds", "nan"], ["drain_seconds"]),
        (["--drain-seconds", "-1"], ["drain_seconds"]),
        (["--set", "limits.header_seconds=0"], ["limits.header_seconds"]),
        (["--set", "limits.max_stored_bytes=-1"], ["limits.max_stored_bytes"]),
        (["--config", "/nowhere/at.toml"], ["/nowhere/at.toml", "No such file"]),
        (["a", "b"], ["argument", "b"]),
    ],
)
def test_mistakes_are_named(arguments, parts):
    with pytest.raises(UsageError) as caught:
        settings(*arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("port = ", "Invalid"),
        ('port = "8000"', "port"),
        ("prot = 1", "did you mean port"),
        ("[engine]\nscheduler = 3", "engine.scheduler"),
        ("[limits]\nmax_body_bytes = true", "limits.max_body_bytes"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, part):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=part):
        settings("--config", str(file))


def test_abu_18_an_empty_key_refuses_to_start():
    for arguments, environment in (
        (["--api-key", ""], {}),
        (["--api-key", "  "], {}),
        ([], {"MINIDSA_API_KEY": ""}),
    ):
        with pytest.raises(UsageError, match="api_key is empty"):
            settings(*arguments, environment=environment)


def test_the_key_comes_from_flag_then_environment_then_file(tmp_path):
    file = tmp_path / "key.toml"
    file.write_text('api_key = "file"')
    assert settings("--config", str(file)).api_key == "file"
    environment = {"MINIDSA_API_KEY": "environment"}
    assert settings("--config", str(file), environment=environment).api_key == "environment"
    assert settings("--api-key", "flag", environment=environment).api_key == "flag"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out = capsys.readouterr()
    return caught.value.code, out.out, out.err


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["serve", "--prot", "1"], 2, "did you mean --port?"),
        (["serve", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["serve", "--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["surf"], 2, "surf"),
        (["make-checkpoint", "/tmp"], 1, "not empty"),
    ],
)
def test_a_refusal_is_one_line_and_an_exit_code(capsys, arguments, code, part):
    found, out, err = run(capsys, *arguments)
    assert found == code
    assert out == ""
    assert err.startswith("minidsa: ") and err.count("\n") == 1 and part in err


ENUMS = [flag for flag in FLAGS if choices_of(flag.target)]


@pytest.mark.parametrize("flag", ENUMS, ids=lambda flag: flag.name)
def test_a_wrong_word_lists_those_that_are_right(flag):
    with pytest.raises(UsageError) as caught:
        settings(flag.name, "float8")
    message = f"{flag.name} is 'float8'; it must be one of {', '.join(choices_of(flag.target))}"
    assert str(caught.value) == message
    for choice in choices_of(flag.target):
        settings(flag.name, choice)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--hots", "--host"),
        ("--max-seqs", "--max-num-seqs"),
        ("--foo", None),
        ("--temperature", None),
        ("--engine", None),
    ],
)
def test_a_name_is_suggested_for_a_slip_alone(name, meant):
    with pytest.raises(UsageError) as caught:
        settings(name, "1")
    assert str(caught.value) == f"unknown flag {name}" + (
        f"; did you mean {meant}?" if meant else ""
    )
    with pytest.raises(UsageError) as caught:
        settings("--set", "engine.cache.colour=1")
    assert str(caught.value) == "unknown setting engine.cache.colour"


@pytest.mark.parametrize("command", [name for name, _ in KNOWN_FLAGS])
def test_help_describes_every_argument_and_shows_no_default_that_is_none(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "[None]" not in out
    commands = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert [a.dest for a in commands.choices[command]._actions if not a.help] == []


def test_help_shows_groups_values_and_defaults(capsys):
    code, out, _ = run(capsys, "serve", "--help")
    assert code == 0
    text = " ".join(out.split())
    for title, flags in GROUPS:
        assert f"{title}: " in text
        for flag in flags:
            assert flag.name in text
    for part in ("{auto,float32,bfloat16,float16}", "[8000]", "[64]", "[the model's context]"):
        assert part in text


def test_plan_prints_what_a_checkpoint_takes(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(MOONLIGHT)))
    code, out, err = run(capsys, "plan", str(tmp_path), "--gpu", "h200", "--max-num-seqs", "8")
    assert (code, err) == (0, "")
    assert out.startswith("memory: ") and "8 requests run at once" in out
    code, same, err = run(
        capsys, "plan", str(tmp_path), "--gpu", "h200", "--max-num-seqs", "8", "--port", "9"
    )
    assert (code, same, err) == (0, out, "minidsa: plan does not use port\n")
    for arguments, expected in (
        (["--gpu", "rtx4090"], (1, "does not fit")),
        (["--gpu", "none"], (2, "there are: ")),
        (["--tp", "5"], (2, "5 devices")),
        (["--gpus", "h200"], (2, "did you mean --gpu?")),
        (["--gpu", "h200", "--max-model-len", "9999"], (2, "the model's context is 8192")),
    ):
        code, out, err = run(capsys, "plan", str(tmp_path), *arguments)
        assert code == expected[0] and out == ""
        assert err.startswith("minidsa: ") and err.count("\n") == 1 and expected[1] in err


def test_version(capsys):
    for arguments in (["version"], ["--version"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert out.startswith("minidsa ")


def test_a_switch_takes_no_value():
    config = settings("--allow-unknown-fields", "folder")
    assert config.allow_unknown_fields and config.engine.model == "folder"
    assert not settings("folder").allow_unknown_fields


def test_a_negative_keep_alive_interval_is_refused():
    with pytest.raises(UsageError, match="sse_keep_alive_interval is -1"):
        settings("--set", "sse_keep_alive_interval=-1")


def test_a_file_of_a_server_is_read_by_other_commands_which_name_what_they_do_not_use(tmp_path):
    file = tmp_path / "serving.toml"
    file.write_text(
        "port = 9\n[limits]\nmax_sequences = 4\n[engine]\nhang_timeout = 5.0\nmax_model_len = 64\n"
        '[engine.scheduler]\npolicy = "priority"\nmax_queue = 1024\n'
    )
    config = settings("--config", str(file), environment={"MINIDSA_API_KEY": "k"})
    both = ["port", "limits.max_sequences", "engine.scheduler.policy"]
    assert sorted(unused_settings("generate", config)) == sorted(both)
    assert sorted(unused_settings("verify", config)) == sorted([*both, "engine.hang_timeout"])
    assert sorted(unused_settings("plan", config)) == ["limits.max_sequences", "port"]


def test_the_file_s_unused_settings_are_said_on_stderr(tmp_path, capsys):
    file = tmp_path / "serving.toml"
    file.write_text("port = 9\n")
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--config", str(file), "--tokens", "1"])
    assert "minidsa: verify does not use port\n" in capsys.readouterr().err
