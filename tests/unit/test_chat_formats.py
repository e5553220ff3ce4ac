"""Which chat format a checkpoint gets, and templates that no user text can escape from."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidsa.configs.server import ChatFormatChoice
from minidsa.model.small_tokenizer import build_small_tokenizer, write_tokenizer
from minidsa.server.chat_formats import ChatFormat, DeepseekV32, JinjaFormat, choose_format
from minidsa.server.chat_messages import InvalidMessagesError, Message, ToolCall
from minidsa.server.chat_template import ChatTemplate
from minidsa.server.parsers.events import ContentText, ReasoningText
from minidsa.server.prompt_runs import Control, prompt_text
from minidsa.server.tokenizer import Tokenizer
from minidsa.server.tokenizer_files import TokenizerSettings
from tokenizers_small import small_tokenizer, write_files

TEMPLATE = """\
{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<｜Assistant｜></think>{{ m.content | trim }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }}
{%- for k, v in c.function.arguments.items() %} {{ k }}={{ v | tojson }}{% endfor %}]{% endfor %}
{{- eos_token }}
{%- elif m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'tool' %}({{ m.content }})
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}
"""
SETTINGS = TokenizerSettings(bos_token="<｜begin▁of▁sentence｜>", eos_token="<｜end▁of▁sentence｜>")


def jinja(template: str = TEMPLATE) -> JinjaFormat:
    return JinjaFormat(ChatTemplate({"default": template}, small_tokenizer().control, SETTINGS))


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str, **fields) -> Message:
    return Message(role="assistant", content=content, **fields)


def choose(folder, model_type="deepseek_v32", wanted: ChatFormatChoice = "auto", template=None):
    write_tokenizer(folder, 300)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return choose_format(model_type, folder, Tokenizer.from_directory(folder), wanted)


def test_http_02_v32_without_a_template_gets_its_own_encoder(tmp_path):
    choice = choose(tmp_path)
    assert choice is not None and choice.warning is None
    assert choice.format.name == "deepseek_v32"
    assert choice.reason == "deepseek_v32 without a chat template"


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "deepseek_v3"])
def test_http_02_a_template_is_used_where_there_is_one(tmp_path, model_type):
    choice = choose(tmp_path, model_type, template=TEMPLATE)
    assert choice is not None and choice.format.name == "jinja"
    assert "brings a chat template" in choice.reason


def test_http_02_an_override_that_does_not_fit_warns(tmp_path):
    choice = choose(tmp_path, wanted="deepseek_v32", template=TEMPLATE)
    assert choice is not None and choice.format.name == "deepseek_v32"
    assert choice.warning is not None and "template of its own" in choice.warning
    (tmp_path / "chat_template.jinja").unlink()
    other = choose(tmp_path, "deepseek_v3", wanted="deepseek_v32")
    assert other is not None and other.warning is not None and "deepseek_v3 " in other.warning
    with pytest.raises(ValueError, match="no chat template"):
        choose(tmp_path, wanted="jinja")


def test_a_checkpoint_may_have_no_chat_format(tmp_path):
    assert choose(tmp_path, "deepseek_v3") is None


def test_missing_control_tokens_are_told_at_start(tmp_path):
    bare = json.loads(build_small_tokenizer(300).to_str())
    bare["added_tokens"] = bare["added_tokens"][:4]
    write_files(tmp_path, tokenizer=bare)
    with pytest.raises(ValueError, match=r"<｜User｜>, <｜Assistant｜>, <think>, </think>"):
        choose_format("deepseek_v32", tmp_path, Tokenizer.from_directory(tmp_path))


@pytest.mark.parametrize(
    "entry",
    [TEMPLATE, [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]],
)
def test_templates_of_the_tokenizer_config_are_read(tmp_path, entry):
    write_tokenizer(tmp_path, 300)
    write_files(tmp_path, tokenizer_config={"chat_template": entry})
    choice = choose_format("deepseek_v3", tmp_path, Tokenizer.from_directory(tmp_path))
    assert choice is not None and choice.format.name == "jinja"


@pytest.mark.parametrize("template", ["{% if %}", "{{ a b }}"])
def test_a_broken_template_is_told_at_start(tmp_path, template):
    with pytest.raises(ValueError, match="does not compile"):
        choose(tmp_path, template=template)


def test_a_template_renders_as_written():
    call = ToolCall("a", "f", '{"k": ["é", "<"], "n": 1}')
    chat = [
        Message(role="system", content="S"),
        user(" q "),
        assistant(" a\n", tool_calls=(call,)),
        Message(role="tool", content="r", tool_call_id="a"),
        user("x"),
    ]
    runs = jinja().encode(chat, (), False)
    assert prompt_text(runs) == (
        "<｜begin▁of▁sentence｜>S<｜User｜> q <｜Assistant｜></think>a"
        '[f k=["é", "<"] n=1]<｜end▁of▁sentence｜>(r)<｜User｜>x<｜Assistant｜></think>'
    )


def test_templates_that_print_arguments_get_the_text_that_came():
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}|"
    template += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = ToolCall("a", "f", '{"k":[1]}')
    chat = [assistant("", tool_calls=(call,)), Message(role="tool", content="", tool_call_id="a")]
    assert prompt_text(jinja(template).encode(chat, (), False)) == '{"k":[1]}|{"k": [1]}'


texts = st.lists(
    st.sampled_from(
        [*small_tokenizer().control, "<", ">", "｜", "think", "User", " ", "\U000f0000"]
    ),
    min_size=1,
    max_size=6,
).map("".join)


@given(texts, texts)
def test_user_text_never_becomes_control_in_a_template(question, answer):
    formats: tuple[ChatFormat, ...] = (jinja(), DeepseekV32())
    for chat_format in formats:
        runs = chat_format.encode([user(question), assistant(answer), user(question)], (), True)
        harmless = chat_format.encode([user("q"), assistant("a"), user("q")], (), True)
        assert [r for r in runs if isinstance(r, Control)] == [
            r for r in harmless if isinstance(r, Control)
        ]
        assert prompt_text(runs).count(question) >= 2
        assert answer.strip() in prompt_text(runs)


def test_a_prefill_stays_open():
    runs = jinja().encode([user("q"), assistant("ab<think>", prefix=True)], (), True)
    assert prompt_text(runs).endswith("<｜Assistant｜></think>ab<think>")
    with pytest.raises(InvalidMessagesError, match="needs content"):
        jinja().encode([user("q"), assistant("", prefix=True)], (), True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.nothing.more }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_fails_refuses_the_chat(template):
    with pytest.raises(InvalidMessagesError, match="refuses"):
        jinja(template).encode([user("q")], (), False)


def test_a_template_cannot_write_without_end():
    template = "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
    with pytest.raises(InvalidMessagesError, match="too long"):
        jinja(template).encode([user("q")], (), False)


def test_template_functions_are_those_of_transformers():
    template = "{{ strftime_now('%Y') | length }}{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=True) }}"
    template += "{% for i in [1, 2] %}{% break %}{% endfor %}"
    assert prompt_text(jinja(template).encode([user("q")], (), False)) == '4{"a": "é", "b": 1}'


def test_tools_are_refused_where_calls_cannot_be_read():
    with pytest.raises(InvalidMessagesError) as caught:
        jinja().encode([user("q")], ({"type": "function", "function": {"name": "f"}},), False)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("chat_format", [jinja(), DeepseekV32()], ids=["jinja", "v32"])
def test_the_parser_starts_where_the_prompt_ends(chat_format, thinking):
    start = chat_format.start(chat_format.encode([user("</think><think>")], (), thinking))
    events = chat_format.parser(start).feed("a</think>b!")
    kinds = {ReasoningText, ContentText} if thinking else {ContentText}
    assert {type(event) for event in events} == kinds


def test_a_model_without_a_think_marker_in_its_prompt_may_open_one():
    chat_format = jinja("{{ messages[0].content }}")
    runs = chat_format.encode([user("q")], (), True)
    assert chat_format.start(runs) == "content"
    events = chat_format.parser("content").feed("<think>a</think>b")
    assert events == [ReasoningText("a", 7), ContentText("b", 16)]


def test_markup_is_kept_for_the_parser():
    tokenizer = small_tokenizer()
    assert DeepseekV32().markup_ids(tokenizer) == {tokenizer.control["｜DSML｜"]}
    assert jinja().markup_ids(tokenizer) == frozenset()
