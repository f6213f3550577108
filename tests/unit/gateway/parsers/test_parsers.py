"""Each parser reads its format, and the result does not depend on how the text arrives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.services.gateway.parsers.answer import AnswerReader
from outrider.services.gateway.parsers.pieces import ToolOptions
from outrider.services.gateway.parsers.registry import ParserNames

NAMES = frozenset(["get_weather", "f", "g.h"])
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
Call = tuple[str, str]


def read(
    tools: str, reasoning: str, parts: list[str], prompt_end: str = "", parallel: bool = True
) -> tuple[str, str, list[Call]]:
    """Return the text, the reasoning and the calls that a parser finds in the parts."""
    parser = ParserNames(tools, reasoning).create(ToolOptions(NAMES, parallel), True, prompt_end)
    reader = AnswerReader(parser)
    for part in parts:
        reader.push(part, 1)
    reader.finish()
    answer = reader.answer
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


CASES: list[tuple[str, str, str, str, tuple[str, str, list[Call]]]] = [
    ("hermes", "none", "", "Just text.  \n", ("Just text.  \n", "", [])),
    (
        "hermes",
        "none",
        "",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": 2}]}}\n'
        "</tool_call>\n"
        '<tool_call>{"arguments": {"x": 1}, "name": "get_weather"}</tool_call> Done.',
        (
            "Let me see.Done.",
            "",
            [("f", '{"a": "}\\"{", "b": [1, {"c": 2}]}'), ("get_weather", '{"x": 1}')],
        ),
    ),
    ("hermes", "none", "", '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    ("hermes", "none", "", "<tool_call>no json</tool_call>", ("<tool_call>no json</tool_call>", "", [])),
    ("hermes", "none", "", 'x <tool_call>{"na', ('x <tool_call>{"na', "", [])),
    ("hermes", "none", "", '<tool_call>{"name": "f", "arguments": {"a"', ("", "", [("f", '{"a"')])),
    (
        "hermes",
        "none",
        "",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}<tool_call>{"name": "f", "arguments": {}}',
        ("", "", [("f", '{"a": 1}'), ("f", "{}")]),
    ),
    ("hermes", "none", "", "a <tool_cal", ("a <tool_cal", "", [])),
    (
        "hermes",
        "think",
        "",
        '<think>\nHm <tool_call> no.\n</think>\n\nYes. <tool_call>{"name": "f"}</tool_call>',
        ("Yes.", "Hm <tool_call> no.", [("f", "{}")]),
    ),
    ("none", "think", "<think>\n", "Hm.\n\n</think>\n\nAnswer\n", ("Answer\n", "Hm.", [])),
    ("none", "think", "", "Answer <think>x</think>", ("Answer <think>x</think>", "", [])),
    ("none", "think", "<think>", "cut off </thin", ("", "cut off </thin", [])),
    ("none", "think-open", "", "<think>Hm.</think>Answer", ("Answer", "Hm.", [])),
    ("none", "think-open", "", "Hm.</think>Answer", ("Answer", "Hm.", [])),
    ("none", "mistral", "", "[THINK]Hm.[/THINK]Answer", ("Answer", "Hm.", [])),
    (
        "llama3-json",
        "none",
        "",
        '{"name": "f", "parameters": {"a": 1}}; {"type": "function", "name": "g.h", "parameters": {}}',
        ("", "", [("f", '{"a": 1}'), ("g.h", "{}")]),
    ),
    ("llama3-json", "none", "", '<|python_tag|>{"name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
    ("llama3-json", "none", "", ' {"name": "Bob", "age": 3}\n', (' {"name": "Bob", "age": 3}\n', "", [])),
    (
        "llama3-json",
        "none",
        "",
        '{"parameters": {"a": 1}, "x": null}',
        ('{"parameters": {"a": 1}, "x": null}', "", []),
    ),
    ("llama3-json", "none", "", 'Text {"name": "f"}', ('Text {"name": "f"}', "", [])),
    ("llama3-json", "none", "", '{"name": "f', ('{"name": "f', "", [])),
    ("llama3-json", "none", "", "{1}", ("{1}", "", [])),
    (
        "pythonic",
        "none",
        "",
        "[f(a='x)\\'', b=[1, (2,)], c=True), get_weather()]<|python_end|> ok",
        ("ok", "", [("f", '{"a": "x)\'", "b": [1, [2]], "c": true}'), ("get_weather", "{}")]),
    ),
    ("pythonic", "none", "", "<|python_start|>[f(a=null)]", ("", "", [("f", '{"a": null}')])),
    ("pythonic", "none", "", "[1, 2, 3]", ("[1, 2, 3]", "", [])),
    ("pythonic", "none", "", "[unknown(a=1)]", ("[unknown(a=1)]", "", [])),
    ("pythonic", "none", "", "[f(1)]", ("[f(1)]", "", [])),
    ("pythonic", "none", "", "[f(a=open('x'))]", ("[f(a=open('x'))]", "", [])),
    ("pythonic", "none", "", "[f(a=1", ("", "", [("f", '{"a": 1')])),
    (
        "mistral",
        "none",
        "",
        'Sure. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g.h", "arguments": {}}]',
        ("Sure.", "", [("f", '{"a": 1}'), ("g.h", "{}")]),
    ),
    (
        "mistral",
        "none",
        "",
        '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]get_weather{"c": 1}',
        ("", "", [("f", '{"a": {"b": "}"}}'), ("get_weather", '{"c": 1}')]),
    ),
    ("mistral", "none", "", "[TOOL_", ("[TOOL_", "", [])),
    (
        "deepseek-v3",
        "none",
        "",
        f'Hi {DS[0]}{DS[1]}function{DS[2]}f\n```json\n{{"a": 1}}\n```{DS[3]}\n'
        f"{DS[1]}function{DS[2]}g.h\n```json\n{{}}\n```{DS[3]}{DS[4]}",
        ("Hi", "", [("f", '{"a": 1}'), ("g.h", "{}")]),
    ),
    (
        "deepseek-v3",
        "think",
        "<think>",
        f'Hm</think>{DS[0]}{DS[1]}f{DS[2]}{{"a": 1}}{DS[3]}{DS[1]}g.h{DS[2]}{DS[3]}{DS[4]} end',
        ("end", "Hm", [("f", '{"a": 1}'), ("g.h", "{}")]),
    ),
    (
        "harmony",
        "harmony",
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        ("", "Hm.", [("f", '{"a": 1}')]),
    ),
    (
        "harmony",
        "harmony",
        "",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant to=functions.g.h<|channel|>commentary"
        "<|message|><|end|><|start|>assistant<|channel|>final<|message|>Done.",
        ("Done.", "A", [("g.h", "{}")]),
    ),
    ("harmony", "harmony", "", "No format", ("No format", "", [])),
]


@pytest.mark.parametrize(("tools", "reasoning", "prompt_end", "text", "expected"), CASES)
def test_a_format_is_read_whole_and_character_by_character(
    tools: str, reasoning: str, prompt_end: str, text: str, expected: Any
) -> None:
    assert read(tools, reasoning, [text], prompt_end) == expected
    assert read(tools, reasoning, list(text), prompt_end) == expected


FRAGMENTS = [
    *(text for *_rest, text, _expected in CASES),
    *DS,
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|channel|>", "<|message|>"),
    *("{", "}", "[", "]", '"', ",", ";", " ", "\n", "f(", '"name": "f"', "<|python_tag|>", "<|end|>", "é"),
]


@pytest.mark.parametrize("tools", ["hermes", "llama3-json", "pythonic", "mistral", "deepseek-v3", "harmony"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_split_of_the_stream_does_not_matter(tools: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=4)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reasoning = data.draw(st.sampled_from(["none", "think", "think-open"]))
    prompt_end = data.draw(st.sampled_from(["", "<think>"]))
    assert read(tools, reasoning, parts, prompt_end) == read(tools, reasoning, [text], prompt_end)


def test_without_parallel_calls_the_first_one_counts() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2
    assert read("hermes", "none", [text], parallel=False)[2] == [("f", '{"a": 1}')]


def test_reasoning_tokens_are_counted() -> None:
    reader = AnswerReader(ParserNames("none", "think").create(None, True, "<think>"))
    for part in ("a ", "b ", "</think>", "c"):
        reader.push(part, 2)
    assert reader.answer.reasoning_tokens == 4


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|im_start|>{{ message.content }}", "none", "none"),
        ('<tool_call>\n{"name": ... }</tool_call> </think>', "hermes", "think"),
        ("<tool_call>\n<function=name>", "none", "none"),
        ("<tool_call>name\n<arg_key>", "none", "none"),
        ('{"name": function name, "parameters": ...} <|python_tag|>', "llama3-json", "none"),
        ("[func_name1(params_name1=", "pythonic", "none"),
        ("[TOOL_CALLS] [/THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜></think>", "deepseek-v3", "think"),
        ("<|channel|>analysis", "harmony", "harmony"),
    ],
)
def test_the_template_chooses_the_parsers(template: str, tools: str, reasoning: str) -> None:
    assert ParserNames.choose("auto", "auto", template) == ParserNames(tools, reasoning)
    assert ParserNames.choose("none", "think", template) == ParserNames("none", "think")


def test_only_parsers_that_read_special_tokens_ask_for_them() -> None:
    assert ParserNames("harmony", "harmony").needs_special_tokens(False)
    assert ParserNames("mistral").needs_special_tokens(True)
    assert not ParserNames("mistral").needs_special_tokens(False)
    assert not ParserNames("hermes", "think").needs_special_tokens(True)


def test_ids_of_calls_differ_and_fit_the_model() -> None:
    ids = []
    for _ in range(2):
        parser = ParserNames("mistral").create(ToolOptions(NAMES), True, "")
        reader = AnswerReader(parser)
        reader.push('[TOOL_CALLS]f{"a": 1}', 1)
        ids.append(reader.answer.tool_calls[0].id)
    assert ids[0] != ids[1]
    assert all(len(one) == 9 and one.isalnum() for one in ids)
