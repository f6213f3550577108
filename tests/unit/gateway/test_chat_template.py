"""Chat templates: common features of published templates work, and hostile templates fail safely."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.toy_text import make_tokenizer

from outrider.services.gateway.chat_template import ChatTemplate
from outrider.services.gateway.tokenizer import SHORT_TEXT, TextCodec
from outrider.shared.base.errors import CheckpointError, InvalidRequestError

DEMO_TARGET = Path(__file__).parents[3] / "models" / "demo" / "target"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>"}]


NESTED = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 11, 21))
    return template.render(MESSAGES if messages is None else messages, options)


def test_names_and_whitespace_rules_that_templates_rely_on() -> None:
    assert (
        render(
            "{{ bos_token }}{% for m in messages %}\n"
            "  {%- if m.role == 'user' %}U{{ m['content'] }}{% endif %}\n{% endfor %}"
        )
        == "<s>Uhi"
    )
    assert render("{{ 'yes' if add_generation_prompt }}{{ tools is none }}") == "yesTrue"
    assert render("{{ strftime_now('%d %b %Y') }}") == "21 Nov 2026"
    assert (
        render(
            "{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
        )
        == "hi"
    )
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_tojson_keeps_html_and_other_scripts_as_they_are() -> None:
    assert render("{{ messages[1] | tojson }}") == '{"role": "assistant", "content": "<b>"}'
    assert render("{{ messages | tojson(indent=2) }}", [{"role": "é"}]) == json.dumps(
        [{"role": "é"}], indent=2, ensure_ascii=False
    )


def test_generation_blocks_render_their_content_and_keep_their_scope() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}[{{ m.content }}]"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    assert render(source) == "[<b>]"


def test_a_refusal_is_the_clients_error_with_the_templates_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ 'a' * 999999999 }}",
        "{{ ('a' * 1000000) * 1000000 }}",
        "{{ 9 ** 9999999 }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ i + j }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.missing.missing }}",
        "{{ 1 / 0 }}",
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
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
        "{% set ns = namespace(x=1) %}"
        "{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=1) %}"
        "{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
        "{% set a = 'a' * 4000 %}{{ a | replace('a', a) | replace('a', a) }}",
        "{% set a = 'a' * 4000 %}{{ a.replace('a', a).replace('a', a) }}",
        "{% set a = 'a' * 4000 %}{{ a.join(a.join('aaaa').join(a)) }}",
        "{% set a = 'a' * 4000 %}{{ range(99999) | join(a) }}",
        "{{ ('%9999d' * 400000) % ([1] * 190000) }}",
        "{% set a = 'a' * 4000000 %}{{ '{0}{0}{0}{0}'.format(a) }}",
        "{{ ('\t' * 1000000).expandtabs(9999) }}",
        "{{ 'aaaa'.translate({97: 'a' * 1000000}) }}",
        "{{ [[]] * 100000 | sum(start=[]) }}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ ([none] * 99999) | map('default', range(99999) | list, true) | list | string }}",
        "{{ range(99999) | map('replace', '1', 'a' * 100000) | list }}",
    ],
)
def test_hostile_and_broken_templates_fail_on_the_request_alone(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.services.gateway.template_bounds.MAX_RENDER_S", 0.3)
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(InvalidRequestError):
        render(source, messages)
    assert messages == MESSAGES


def test_an_endless_output_is_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.services.gateway.template_bounds.MAX_OUTPUT_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="longer than 1000"):
        render("{% for i in range(90000) %}xxxxxxxxxx{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ unclosed",
        "{% nonsense %}",
        "x" * 300_000,
        NESTED,
        "{{ 1 | slice(9) }}",
    ],
)
def test_a_template_that_does_not_compile_is_a_start_up_error(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source, {})


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    def content_of(folder: Path) -> str | None:
        template = TextCodec.load(folder).template
        return template and template.render([], {})

    folder = make_tokenizer(tmp_path, template="in config")
    assert content_of(folder) == "in config"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named {{ bos_token }} {{ eos_token }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert content_of(folder) == "named <|bos|> <|eos|>"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "in json"}))
    assert content_of(folder) == "in json"
    (folder / "chat_template.jinja").write_text("in jinja")
    assert content_of(folder) == "in jinja"
    assert TextCodec.load(make_tokenizer(tmp_path / "plain", template=None)).template is None


def test_a_missing_tokenizer_names_the_file_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="outrider convert tokenizer") as caught:
        TextCodec.load(tmp_path)
    assert "--skip-tokenizer" in caught.value.message
    assert caught.value.field == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{}"), ("tokenizer_config.json", "{"), ("tokenizer_config.json", "[]")],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize("length", [1, SHORT_TEXT + 1])
def test_long_texts_are_encoded_aside(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    codec = TextCodec.load(DEMO_TARGET)
    threads: list[int] = []
    encode = codec.tokenizer.encode
    aside = asyncio.to_thread

    async def noted(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        threads.append(length)
        return await aside(work, *arguments, **options)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    text = "a " * length
    assert list(asyncio.run(codec.encode_aside(text))) == encode(text).ids
    messages = [{"role": "user", "content": text}]
    assert asyncio.run(codec.encode_chat_aside(messages, {})) == codec.encode_chat(messages, {})
    # Templates may take long on any chat, so every chat goes to a worker thread.
    assert len(threads) == (2 if length > SHORT_TEXT else 1)


def test_running_out_of_memory_is_a_named_error() -> None:
    def no_memory() -> datetime:
        raise MemoryError

    with pytest.raises(InvalidRequestError, match="MemoryError"):
        ChatTemplate("{{ strftime_now('%Y') }}", {}, no_memory).render(MESSAGES, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
        ("{% for a, b in [(1, 2), (3, 4)] if b > 2 %}{{ a }}{{ loop.index }}{% endfor %}", "31"),
        ("{% set a, b = 1, [2, messages[0].role] %}{{ a }}{{ b }}", "1[2, 'user']"),
        ("{% for i in [] %}{% else %}none{% endfor %}", "none"),
        ("{{ ['a', 'b'] | join('-') }}{{ '-'.join(['a', 'b']) }}{{ 'x.y'.replace('.', '!') }}", "a-ba-bx!y"),
        ("{{ messages | map(attribute='role') | list }}{{ [1, 2] | sum }}{{ 2 ** 10 }}", "['user']31024"),
        ("{{ '%s is %d' % ('a', 1) }}{{ '{} and {:02d}'.format('b', 3) }}", "a is 1b and 03"),
        ("{{ {'a': [1, {'b': none}]} | tojson }}{{ 1.25 | round(1) }}", '{"a": [1, {"b": null}]}1.2'),
    ],
)
def test_what_templates_use_works_within_the_bounds(source: str, text: str) -> None:
    assert render(source, [{"role": "user", "content": "x"}]) == text


@pytest.mark.parametrize("special", [True, False])
def test_long_texts_get_the_same_ids_as_short_ones(special: bool) -> None:
    codec = TextCodec.load(DEMO_TARGET)
    draw = random.Random(3)
    pieces = [*codec.special_tokens, " ", "\n\n", "é🦊", "\u2028", "the capital of ", "x" * 40, "\x00"]
    text = "".join(draw.choice(pieces) for _ in range(SHORT_TEXT))
    assert len(text) > SHORT_TEXT
    expected = tuple(codec.tokenizer.encode(text, add_special_tokens=special).ids)
    assert codec.encode(text, add_special_tokens=special) == expected
