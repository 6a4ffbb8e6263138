"""Templates that nobody has vetted: no way to Python's internals, and bounds on time, memory and output."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models import template_limits as limits
from octavo.models.chat_template import ChatTemplate, TemplateError

CHAT = [{"role": "user", "content": "hi"}]

ACCESS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'].x }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|map(attribute='__class__.__name__')|join }}{{ nope.x }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
    "{{ ('{0.__class__.__mro__}'|format)(1) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f(1) }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({}) }}",
    "{{ (1).to_bytes(9, 'big') }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages.clear() }}",
    "{{ lipsum() }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ dict.fromkeys([1]) }}",
    "{{ loop.x }}",
]


@pytest.mark.parametrize("source", ACCESS)
def test_no_access_to_internals_and_no_mutation(source):
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(chat)
    assert chat == CHAT
    assert source not in str(caught.value) and "\n" not in str(caught.value)


GROW = "{% set ns = namespace(x='aaaaaaaa', y=['a']) %}{% for i in range(64) %}"
COSTS = {
    "range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested output": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "lists of lists": GROW + "{% for j in range(99999) %}{% for k in range(99999) if k < 0 %}{% endfor %}{% endfor %}{% endfor %}",
    "multiplied text": "{{ 'a' * 10 ** 9 }}",
    "multiplied list": "{{ [0] * 10 ** 9 }}",
    "multiplied twice": "{{ ([messages] * 1000) * 1000 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of power": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent precision": "{{ '%.999999999f' % 1 }}",
    "percent mapping": "{{ '%(a)999999999d' % {'a': 1} }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 999999999) }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "center": "{{ 'a'.center(999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "indent": "{{ 'x'|indent(99999999) }}",
    "tojson indent": "{{ messages|tojson(indent=99999999) }}",
    "date width": "{{ strftime_now('%999999999d') }}",
    "round": "{{ 5|round(999999999, 'ceil') }}",
    "sum of lists": "{{ [[1]] * 1000 }}{{ ([[1]] * 1000)|sum(start=[]) }}",
    "concatenation": GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "addition": GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list addition": GROW + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
    "block set": GROW + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + GROW + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "replace filter": GROW + "{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
    "replace method": GROW + "{% set ns.x = ns.x.replace('', 'aa') %}{% endfor %}",
    "join filter": GROW + "{% set ns.x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}",
    "join method": GROW + "{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "nested lists": GROW + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
    "nested tuples": GROW + "{% set ns.y = (ns.y, ns.y) %}{% endfor %}{% if ns.y == ns.y %}{% endif %}",
    "nested dicts": GROW + "{% set ns.y = {'a': ns.y, 'b': ns.y} %}{% endfor %}{{ ns.y|tojson }}",
    "nested calls": GROW + "{% set ns.y = dict(a=ns.y, b=ns.y) %}{% endfor %}{{ ns.y }}",
    "deep json": GROW + "{% for j in range(9) %}{% set ns.y = [ns.y] %}{% endfor %}{% endfor %}{% for z in range(99) %}"
    "{% set ns.y = [ns.y, range(9999)|list] %}{% endfor %}{{ ns.y|tojson(indent=64) }}",
    "output": "{% set a = 'x' * 1000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "constant output": "{% for i in range(99999) %}" + "x" * 2000 + "{% endfor %}",
    "constant block": "{% set b %}{% for i in range(99999) %}" + "x" * 2000 + "{% endfor %}{% endset %}",
    "written and dropped": "{% set a = 'x' * 1000000 %}{% for i in range(99999) %}{% set b = a ~ 'y' %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "wide recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
    "block recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep source": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep blocks": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "long source": "x" * 300_000,
    "slow comparisons": "{% set a = range(9999)|list %}{% set b = range(9999)|list %}"
    "{% for i in range(99999) %}" + "{% if a == b %}{% endif %}" * 9 + "{% endfor %}",
}


def test_hostile_templates_end_soon_and_stay_small():
    """All of them in one process whose memory is limited, each soon after the limit of CPU time (which is lowered, to be quick)."""
    code = f"""
import resource, sys, time
from octavo.models import template_limits
from octavo.models.chat_template import ChatTemplate, TemplateError
template_limits.CPU_S = 0.5
ChatTemplate("{{{{ 1 }}}}").render({CHAT!r})
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
for name, source in {COSTS!r}.items():
    start_s = time.process_time()
    try:
        ChatTemplate(source).render({CHAT!r})
        sys.exit(name + ": not refused")
    except TemplateError as error:
        if len(str(error)) > 300:
            sys.exit(name + ": long message")
    if time.process_time() - start_s > 2:
        sys.exit(name + ": slow")
"""
    done = subprocess.run([sys.executable, "-"], input=code, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_limit_is_named_with_its_value():
    with pytest.raises(TemplateError, match="more than 1000000 steps"):
        ChatTemplate(COSTS["nested ranges"]).render(CHAT)
    with pytest.raises(TemplateError, match=r"a value of more than \d+ characters"):
        ChatTemplate(COSTS["multiplied text"]).render(CHAT)
    with pytest.raises(TemplateError, match="calls itself too deeply"):
        ChatTemplate(COSTS["recursion"]).render(CHAT)


def test_cpu_time_is_bounded_where_no_other_limit_is(monkeypatch):
    monkeypatch.setattr(limits, "CPU_S", 0.05)
    start_s = time.thread_time()
    with pytest.raises(TemplateError, match=r"more than 0\.05 s"):
        ChatTemplate(COSTS["slow comparisons"]).render(CHAT)
    assert time.thread_time() - start_s < 2


def test_limits_grow_with_the_chat():
    """A megabyte of messages is rendered by templates that copy it a few times over."""
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 2000} for i in range(101)]
    one_turn = "{% set ns.t = ns.t ~ m.role ~ ': ' ~ m.content ~ '\n' %}"
    source = "{% set ns = namespace(t='') %}{% for m in messages %}" + one_turn + "{% endfor %}{{ ns.t }}"
    assert len(ChatTemplate(source).render(chat)) == sum(len(m["role"]) + 3 + len(m["content"]) for m in chat)
    gathering = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l|length }}"
    assert ChatTemplate(gathering).render(chat) == "101"


def test_limits_are_of_one_render_each():
    template = ChatTemplate("{% for i in range(90000) %}x{% endfor %}")
    for _ in range(15):  # together more than the steps of one
        assert len(template.render(CHAT)) == 90000


def test_threads_do_not_share_a_budget():
    results = {}

    def render(name, source):
        try:
            results[name] = ChatTemplate(source).render(CHAT)
        except TemplateError as error:
            results[name] = str(error)

    threads = [threading.Thread(target=render, args=(i, "{{ 'a' * 10 ** 9 }}" if i % 2 else "{{ 'a' * 10 ** 6 }}")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(("characters" in text) == bool(i % 2) for i, text in results.items()) and len(results) == 8


def test_messages_cannot_inject_template_code():
    chat = [{"role": "user", "content": "{{ 7 * 7 }}{% for x in y %}"}]
    assert ChatTemplate("{{ messages[0].content }}").render(chat) == chat[0]["content"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"^chat template, line 1: Expected an expression"),
        ("a\nb\n{{ x", r"^chat template, line 3: unexpected end of template"),
        ("{{ x|nofilter }}", r"^chat template, line 1: No filter named 'nofilter'"),
        ("{% nope %}", r"^chat template, line 1: Encountered unknown tag 'nope'"),
        ("{{ nope.x }}", r"^chat template: 'nope' is undefined$"),
        ("{{ 1 + 'a' }}", r"^chat template: unsupported operand"),
        ("{{ 1 / 0 }}", r"^chat template: division by zero$"),
        ("{{ messages[0].x.y }}", r"^chat template: 'dict object' has no attribute 'x'$"),
        ("{{ raise_exception('Say please') }}", r"^Say please$"),
        ("{{ raise_exception('x' * 100000) }}", r"^x{1000}$"),
    ],
)
def test_messages_of_errors_have_no_source_lines(source, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(CHAT)


values = st.recursive(
    st.one_of(st.text(max_size=5), st.integers(-(2**70), 2**70), st.none(), st.booleans(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(value=values)
def test_counted_size_bounds_what_is_printed(value):
    """The invariant of the limits: what a value prints is at most a few times what it counts."""
    assert len(str(value)) <= 12 * limits.size_of(value, 1 << 60) + 30


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=12), old=st.text("ab", max_size=3), new=st.text("xy", max_size=4), count=st.integers(-1, 5))
def test_length_of_a_replacement_is_known_before_it_is_made(text, old, new, count):
    assert limits.replaced_chars(text, old, new, count) == len(text.replace(old, new, count))


def test_peak_memory_of_ordinary_use_is_small():
    """Of what Python allocates: what the process has is also others' doing."""
    tracemalloc.start()
    try:
        for _ in range(50):
            ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(CHAT * 50)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000 << 10, peak_bytes
