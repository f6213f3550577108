"""The process that renders chat templates: its output, and its limits on time and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from outrider.services.gateway.templates import renderer as module
from outrider.services.gateway.templates.renderer import TemplateRenderer
from outrider.shared.base.errors import CheckpointError, InvalidRequestError

MESSAGES = [{"role": "user", "content": "hi é🦊"}, {"role": "assistant", "content": "<b>\ud800"}]
MakeRenderer = Callable[[str], TemplateRenderer]


@pytest.fixture
def make_renderer() -> Iterator[MakeRenderer]:
    made: list[TemplateRenderer] = []

    def make(source: str) -> TemplateRenderer:
        made.append(TemplateRenderer(source, {"bos_token": "<s>"}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 999999999 }}",
        "{{ ('a' * 1000000) * 1000000 }}",
        "{{ 9 ** 9999999 }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ i + j }}{% endfor %}{% endfor %}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:9999999999d}'.format(1) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a'.center(width=9999999999) }}",
        "{{ 'a' | indent(9999999999, true) }}",
        "{{ messages | tojson(indent=9999999999) }}",
        "{% set ns = namespace(x='aaaaaaaa') %}"
        "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set r = range(99999) %}"
        "{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r if j < 0 %}{% endfor %}{% endfor %}",
        "{{ lipsum(n=1000000) }}",
        "{% set ns = namespace(x=9) %}{% for i in range(20) %}{% set ns.x = ns.x ** 64 %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}{{ ns.x | string }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
        "{{ ns.x }}",
        "{% set ns = namespace(x=1) %}"
        "{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}"
        "{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
        "{% set a = 'a' * 4000 %}{{ a | replace('a', a) | replace('a', a) }}",
        "{% set a = 'a' * 4000 %}{{ a.replace('a', a).replace('a', a) }}",
        "{% set a = 'a' * 4000 %}{{ a.join(a.join('aaaa').join(a)) }}",
        "{% set a = 'a' * 4000 %}{{ range(99999) | join(a) }}",
        "{{ ('%9999d' * 400000) % ([1] * 190000) }}",
        "{% set a = 'a' * 4000000 %}{{ '{0}{0}{0}{0}'.format(a) }}",
        "{{ ('\t' * 1000000).expandtabs(9999) }}",
        "{{ ('aaaa' * 1000).translate({97: 'a' * 1000000}) }}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ ([none] * 99999) | map('default', range(99999) | list, true) | list | string }}",
        "{{ range(99999) | map('replace', '1', 'a' * 100000) | list }}",
        "{% set a='a'*4000000 %}{% set b=('a'*100000)~'b'~('a'*100000) %}{{ a.rfind(b) }}",
        "{% set a='a'*4000000 %}{% set b=('a'*100000)~'b'~('a'*100000) %}{{ a.rsplit(b) }}",
        "{% set a = namespace(x=cycler(1)) %}"
        "{% for i in range(40) %}{% set a.x = cycler(a.x, a.x).items %}{% endfor %}"
        "{{ a.x | string | length }}",
        "{% set a = namespace(x=[1]) %}{% macro g() %}{% set a.x = varargs %}{% endmacro %}"
        "{% for i in range(40) %}{{ g(a.x, a.x) }}{% endfor %}{{ a.x | string | length }}",
    ],
)
def test_hostile_templates_fail_on_the_request_alone(
    source: str, make_renderer: MakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 0.5)
    monkeypatch.setattr(module, "RENDER_S", 0.3)
    # Jinja computes constant expressions when it compiles a template.
    with pytest.raises((InvalidRequestError, CheckpointError)):
        make_renderer(source).submit(MESSAGES, {}).result()


def test_chats_are_rendered_as_the_template_says(make_renderer: MakeRenderer) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}{{ x }}"
    )
    renderer = make_renderer(source)
    assert renderer.submit(MESSAGES, {"x": 1}).result() == "<s>hi é🦊<b>\ud800True1"
    assert renderer.submit([], {"x": "\n"}, False).result() == "<s>False\n"


def test_a_refusal_arrives_with_the_templates_words(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        renderer.submit(MESSAGES, {}).result()


def test_after_a_chat_that_took_too_long_the_next_one_is_rendered(make_renderer: MakeRenderer) -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    renderer = make_renderer("{% if messages %}" + slow + "{% endif %}text")
    with pytest.raises(InvalidRequestError, match="takes longer than 2 s"):
        renderer.submit(MESSAGES, {}).result()
    assert renderer.submit([], {}).result() == "text"


def test_a_process_that_has_ended_is_replaced(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("text")
    assert renderer.submit([], {}).result() == "text"
    assert renderer._process is not None
    renderer._process.interrupt()
    renderer._process._process.wait()
    assert renderer.submit([], {}).result() == "text"


def test_a_template_that_does_not_compile_ends_the_start(make_renderer: MakeRenderer) -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        make_renderer("{% for %}").start().result()


def test_a_large_chat_arrives_complete(make_renderer: MakeRenderer) -> None:
    text = "é🦊" * 500_000
    assert make_renderer("{{ messages[0].content }}").submit([{"content": text}], {}).result() == text


def test_closing_ends_a_chat_that_is_being_rendered(
    make_renderer: MakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENDER_S", 600.0)
    renderer = make_renderer("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    renderer.start().result()
    process, sent = renderer._process, threading.Event()
    assert process is not None
    send = process.send
    monkeypatch.setattr(process, "send", lambda line: (send(line), sent.set()))
    chat = renderer.submit([], {})
    assert sent.wait(60)
    renderer.close()
    assert isinstance(chat.exception(0), InvalidRequestError)
