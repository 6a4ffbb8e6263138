"""Chats as text: system messages, continued messages, tool calls, BOS (A19, A20, A21)."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from octavo.models.chat_template import ChatTemplate, TemplateError
from octavo.models.tokenizer import Tokenizer

from .vocabularies import bytes_metadata

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Gemma's way: no system role, strict turns, the content trimmed.
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
SILENT = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}: {{ m.content }}]{% endif %}{% endfor %}"


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


# --- A19 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize(("template", "count"), [("{{ bos_token }}{{ messages[0].content }}", 1), ("{{ messages[0].content }}", 0)])
def test_a_chat_has_the_bos_of_its_template_and_no_other(add_bos, template, count):
    tokenizer = Tokenizer.from_gguf({**bytes_metadata(add_bos_token=add_bos), "tokenizer.chat_template": template})
    text = ChatTemplate(tokenizer.chat_template_source, tokenizer.bos_token, tokenizer.eos_token).render([user("hi")])
    assert tokenizer.encode(text, add_special_tokens=False) == [256] * count + [258]
    # The same text sent as a plain prompt: the model's own setting, and never a second BOS.
    assert tokenizer.encode(text) == [256] * max(count, int(add_bos)) + [258]


def test_a_model_without_bos_has_none():
    tokenizer = Tokenizer.from_gguf(bytes_metadata(bos_token_id=None))
    text = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", tokenizer.bos_token).render([user("hi")])
    assert text == "hi" and tokenizer.encode(text, add_special_tokens=False) == [258]


# --- A20 -------------------------------------------------------------------------------------------------------------


def test_plain_chat():
    text = ChatTemplate(CHATML).render([user("hi"), assistant("yo"), user("?")])
    assert text == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML).render([user("hi")], add_generation_prompt=False).endswith("hi<|im_end|>\n")


@pytest.mark.parametrize("systems", [["Rules."], ["Rules.", "More rules."]])
@pytest.mark.parametrize("template", [STRICT, SILENT])
def test_system_text_goes_before_the_first_user_turn(template, systems):
    chat = [*map(system, systems), user("hi"), assistant("yo"), user("?")]
    merged = [user("\n\n".join([*systems, "hi"])), *chat[len(systems) + 1 :]]
    render = ChatTemplate(template, "<bos>").render
    assert render(chat) == render(merged)
    assert "Rules." in render(chat)


def test_system_text_stays_where_the_template_has_a_place_for_it():
    text = ChatTemplate(CHATML).render([system("Rules."), user("hi")])
    assert text.startswith("<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    shouting = "{% for m in messages %}{{ m.content | upper }} {% endfor %}"  # rewritten, but not left out
    assert ChatTemplate(shouting).render([system("rules"), user("hi")]) == "RULES HI "


@pytest.mark.parametrize(
    ("chat", "sentence"),
    [
        ([system("s"), user("a"), user("b")], ALTERNATE),
        ([user("a"), user("b")], ALTERNATE),
        ([user("a"), assistant("b"), {"role": "tool", "content": "t"}], ALTERNATE),
        ([{"role": "critic", "content": "a"}], ALTERNATE),
        ([assistant("a")], ALTERNATE),
        ([system("s")], "System role not supported"),
        ([system("s"), assistant("a")], "System role not supported"),
    ],
)
def test_the_templates_own_sentence_is_the_error(chat, sentence):
    with pytest.raises(TemplateError, match=f"^{re.escape(sentence)}$") as caught:
        ChatTemplate(STRICT).render(chat)
    assert isinstance(caught.value, ValueError) and caught.value.param == "messages" and caught.value.__cause__ is None


def test_unknown_role_is_the_templates_business():
    assert "<|im_start|>critic\nbad<|im_end|>" in ChatTemplate(CHATML).render([{"role": "critic", "content": "bad"}])


def test_developer_is_system_to_templates_that_do_not_know_it():
    chat = [{"role": "developer", "content": "Rules."}, user("hi")]
    assert ChatTemplate(CHATML).render(chat) == ChatTemplate(CHATML).render([system("Rules."), user("hi")])
    knows = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %} {% endfor %}"
    assert ChatTemplate(knows).render(chat) == "developer! user "
    assert chat[0]["role"] == "developer"  # the caller's messages are not touched


def test_last_message_from_the_assistant_is_closed_and_answered():
    assert ChatTemplate(STRICT).render([user("a"), assistant("b")]).endswith("b<end_of_turn>\n<start_of_turn>model\n")


@pytest.mark.parametrize("template", [CHATML, STRICT, SILENT])
@pytest.mark.parametrize("text", ["The answer is", "e", "<end_of_turn>", "im_end", "]", "two\nlines", "model", "中文😀"])
def test_a_continued_message_ends_where_it_ends(template, text):
    """Also where the text occurs again in what the template writes after it."""
    render = ChatTemplate(template).render
    open_turn = render([user("q"), assistant("")], add_generation_prompt=False)
    continued = render([user("q"), assistant(text)], continue_final_message=True)
    assert continued.endswith(text)
    assert open_turn.startswith(continued.removesuffix(text))
    assert render([user("q"), assistant(text)], add_generation_prompt=False).startswith(continued)


def test_blanks_at_the_end_stay_if_the_template_keeps_them():
    chat = [user("q"), assistant("The answer is ")]
    assert ChatTemplate(CHATML).render(chat, continue_final_message=True).endswith("The answer is ")
    assert ChatTemplate(STRICT).render(chat, continue_final_message=True).endswith("The answer is")


def test_continue_and_generation_prompt_exclude_each_other():
    with pytest.raises(TemplateError, match="continue_final_message: not together with add_generation_prompt") as caught:
        ChatTemplate(CHATML).render([user("a"), assistant("b")], add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    assert ChatTemplate(CHATML).render([user("a"), assistant("b")], False, True).endswith("\nb")


def test_nothing_to_continue():
    with pytest.raises(TemplateError, match=r"messages\[1\]\.content: empty"):
        ChatTemplate(CHATML).render([user("a"), assistant("")], continue_final_message=True)
    with pytest.raises(TemplateError, match="does not show the final message"):
        ChatTemplate("{{ messages[0].content }}").render([user("a"), assistant("b")], continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        ({"role": "user"}, "at least one message"),
        ([1], r"messages\[0\]: a int is not a message"),
        ([{"content": "x"}], r"messages\[0\]\.role: None"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role: 1"),
        ([user("a"), user(None)], r"messages\[1\]\.content: null is allowed only for an assistant message with tool_calls"),
        ([user("a"), assistant(None)], r"messages\[1\]\.content: null"),
        ([{"role": "user"}], r"messages\[0\]\.content: null"),
        ([user(5)], r"messages\[0\]\.content: a number is not content"),
        ([user({"type": "text"})], r"messages\[0\]\.content: an object is not content"),
        ([user([{"type": "text", "text": "a"}, {"type": "image_url"}])], r"content\[1\]: parts of type 'image_url' are not supported"),
        ([user(["a"])], r"messages\[0\]\.content\[0\]: parts of type 'str'"),
        ([user([{"type": "text", "text": 1}])], r"messages\[0\]\.content\[0\]\.text: a string"),
        ([assistant("", tool_calls={})], r"messages\[0\]\.tool_calls: a list"),
        ([assistant(None, tool_calls=["f"])], r"messages\[0\]\.tool_calls\[0\]: an object"),
        ([assistant(None, tool_calls=[{"type": "function"}])], r"messages\[0\]\.tool_calls\[0\]\.function: an object"),
    ],
)
def test_messages_that_do_not_fit(messages, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(CHATML).render(messages)


def test_text_parts_are_joined_by_newlines():
    parts = user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
    assert ChatTemplate("{{ messages[0].content }}").render([parts]) == "one\ntwo"


# --- A21 -------------------------------------------------------------------------------------------------------------

CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
ENDS = "{% endfor %}{% endfor %}"
TOOL_STYLES = {
    "items": CALLS + "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}" + ENDS,
    "tojson": CALLS + "{{ c.function.arguments|tojson }}" + ENDS,
    "plus": CALLS + "{{ 'call:' + c.function.arguments }}" + ENDS,
    "tilde": CALLS + "{{ 'call:' ~ c.function.arguments }}" + ENDS,
    "print": CALLS + "{{ c.function.arguments }}" + ENDS,
    "test": CALLS + "{% if c.function.arguments is string %}s{% else %}{{ c.function.arguments|tojson }}{% endif %}" + ENDS,
    "method": CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}" + ENDS,
}
JSON_TEXT = '{"city": "Đà Nẵng <3"}'
TOOL_TEXT = {
    "items": "city=Đà Nẵng <3;",
    "tojson": JSON_TEXT,
    "plus": "call:" + JSON_TEXT,
    "tilde": "call:" + JSON_TEXT,
    "print": JSON_TEXT,
    "test": JSON_TEXT,
    "method": "city=Đà Nẵng <3;",
}


def tool_chat(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [user("w?"), assistant(None, tool_calls=[call]), {"role": "tool", "tool_call_id": "1", "content": "sunny"}]


@pytest.mark.parametrize("style", sorted(TOOL_STYLES))
@pytest.mark.parametrize(
    "arguments",
    ['{"city":"Đà Nẵng <3"}', json.dumps({"city": "Đà Nẵng <3"}), {"city": "Đà Nẵng <3"}],
    ids=["string", "escaped", "object"],
)
def test_arguments_are_one_json_object_to_every_template(style, arguments):
    assert ChatTemplate(TOOL_STYLES[style]).render(tool_chat(arguments)) == TOOL_TEXT[style]


@pytest.mark.parametrize("arguments", ["", "  ", None, {}, "{}"])
def test_no_arguments(arguments):
    assert ChatTemplate(TOOL_STYLES["tojson"]).render(tool_chat(arguments)) == "{}"
    assert ChatTemplate(TOOL_STYLES["plus"]).render(tool_chat(arguments)) == "call:{}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{", "not valid JSON"),
        ('{"a": NaN}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "a JSON object is needed, not a list"),
        ("5", "a JSON object is needed, not a int"),
        ("null", "a JSON object is needed, not a NoneType"),
        ([1], "a JSON object is needed, not a list"),
        (5, "a JSON object is needed, not a int"),
    ],
)
def test_arguments_that_are_no_object_name_the_message(arguments, message):
    with pytest.raises(TemplateError, match=rf"^messages\[1\]\.tool_calls\[0\]\.function\.arguments: {re.escape(message)}"):
        ChatTemplate(TOOL_STYLES["tojson"]).render(tool_chat(arguments))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[1].content is none }}", "True"),  # DeepSeek finds tool calls this way
        ("{{ messages[1].content == none }}", "True"),
        ("{{ messages[1].content != none }}", "False"),
        ("{{ messages[1].content is not none }}", "False"),
        ("{% if messages[1].content %}text{% endif %}", ""),
        ("{{ '<' + messages[1].content + '>' }}", "<>"),  # ChatML joins it
        ("{{ messages[1].content }}", ""),  # and never the word None
        ("{{ messages[1].content | trim }}", ""),
        ("{{ messages[0].content is none }}{{ '' is none }}{{ tools is none }}", "FalseFalseTrue"),
    ],
)
def test_null_content_is_null_to_tests_and_empty_to_text(template, text):
    assert ChatTemplate(template).render(tool_chat("{}")) == text


def test_the_callers_messages_are_not_touched():
    chat = tool_chat('{"a": 1}')
    before = json.dumps(chat)
    ChatTemplate(TOOL_STYLES["tojson"]).render(chat)
    assert json.dumps(chat) == before


# --- variables and features ------------------------------------------------------------------------------------------


def test_variables_of_the_template():
    source = "{{ bos_token }}|{{ eos_token }}|{{ tools|tojson }}|{{ documents is none }}|{{ thinking }}|{{ date }}"
    template = ChatTemplate(source, "<s>", "</s>")
    assert template.render([user("x")], tools=[{"a": "<é>"}], thinking=True) == '<s>|</s>|[{"a": "<é>"}]|True|True|'
    for name in ("bos_token", "self"):
        with pytest.raises(TemplateError, match=f"{name!r} is set by other means") as caught:
            template.render([user("x")], **{name: "x"})
        assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% generation %}{{ 'a' }}{% endgeneration %}b", "ab"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{{ {'b': [1, none, true], 'a': '<\"é\">'}|tojson }}", '{"b": [1, null, true], "a": "<\\"é\\">"}'),
        ("{{ {'b': 1, 'a': [2]}|tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'),
        ("{{ 'é'|tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ {'a': 1, 'b': 2}|tojson(separators=(',', ':')) }}", '{"a":1,"b":2}'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x, y='d') %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{{ f(2, y=3) }}", "<1d><23>"),
        ("{% for x in [1, 2] %}{{ loop.index }}{{ loop.first }}{{ loop.last }} {% endfor %}", "1TrueFalse 2FalseTrue "),
        ("{% for x in [5, 6] %}{{ loop.length }}{{ loop.revindex }}{{ x }} {% endfor %}", "225 216 "),
        ("{% for x in [1, 2, 3] %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}", "2a13b2a"),
        ("{% for x in [] %}x{% else %}none{% endfor %}", "none"),
        ("{{ 'a-b'.split('-')[1] }}{{ 'x'.upper() }}{{ ' y '.strip() }}{{ {'k': 1}.get('k') }}{{ 'abc'.startswith('a') }}", "bXy1True"),
        ("{{ ['a', 'b']|join(', ') }}{{ ','.join(['c', 'd']) }}{{ [{'n': 1}, {'n': 2}]|join('+', attribute='n') }}", "a, bc,d1+2"),
        ("{{ '%s=%03d' % ('a', 7) }}{{ '{}-{:>3}'.format('b', 'c') }}{{ '%s'|format('d') }}", "a=007b-  cd"),
        ("{{ messages[::-1][0].role }}{{ messages|map(attribute='role')|list|length }}", "user1"),
        ("{{ messages|selectattr('role', 'equalto', 'x')|list }}{{ messages|rejectattr('role', 'equalto', 'x')|list|count }}", "[]1"),
        ("{{ [3, 1]|sort|first }}{{ 'abc'|replace('b', 'x') }}{{ 'a\nb'|indent(2) }}", "1axca\n  b"),
        ("{{ 2.567|round(1) }}{{ [1, 2]|sum }}{{ messages|sum(attribute='n', start=0.5) if false }}", "2.63"),
        ("{{ 'a' ~ 1 ~ none }}{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ 7 // 2 }}{{ [1] + [2] }}", "a1None1024abab3[1, 2]"),
        ("{% set x %}in {{ 'side' }}{% endset %}{{ x }}{% call m() %}{% endcall %}", None),
        ("{{ undefined_thing }}{{ messages[0].nothing }}{{ (messages[0].nothing or 'd') }}", "d"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ 'a'|default('b') }}{{ nope|default('b') }}{{ nope is defined }}", "abFalse"),
    ],
)
def test_features_that_templates_use(template, text):
    if text is None:
        with pytest.raises(TemplateError, match="'m' is undefined"):
            ChatTemplate(template).render([user("hi")])
    else:
        assert ChatTemplate(template).render([user("hi")]) == text


def test_opening_a_template_imports_no_jinja2():
    code = (
        "import sys; from octavo.models.chat_template import ChatTemplate; t = ChatTemplate('{{ 1 }}');"
        "assert 'jinja2' not in sys.modules; t.render([{'role': 'user', 'content': ''}]); assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
