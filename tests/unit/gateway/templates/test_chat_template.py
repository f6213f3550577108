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
from support.models.toy_text import make_tokenizer

from outrider.services.gateway.templates.chat_template import ChatTemplate
from outrider.services.gateway.tokenizer import SHORT_TEXT, TextCodec
from outrider.shared.base.errors import CheckpointError, InvalidRequestError

DEMO_TARGET = Path(__file__).parents[4] / "models" / "demo" / "target"
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
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.missing.missing }}",
        "{{ 1 / 0 }}",
        "{{ [[]] * 100000 | sum(start=[]) }}",
    ],
)
def test_broken_templates_fail_on_the_request_alone(source: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(InvalidRequestError):
        render(source, messages)
    assert messages == MESSAGES


def test_an_endless_output_is_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.services.gateway.templates.chat_template.MAX_OUTPUT_CHARS", 1000)
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
        "{{ 1 | nonsense }}",
    ],
)
def test_a_template_that_does_not_compile_is_a_start_up_error(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source, {})


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    def content_of(folder: Path) -> str | None:
        template = TextCodec.load(folder).template
        return template and ChatTemplate(template.source, template.special_tokens).render([], {})

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
    # Rendering has its own process. Only the encoding of long texts uses a worker thread.
    assert len(threads) == (2 if length > SHORT_TEXT else 0)
    codec.template.close()


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
def test_what_templates_use_works(source: str, text: str) -> None:
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
