"""Fields with arbitrary JSON: invalid values are refused, and too many values are refused before parsing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.services.gateway.guards.json_body import parse_body
from outrider.services.gateway.schemas import json_values
from outrider.services.gateway.schemas.anthropic import MessagesRequest
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.schemas.constraint_types import schema_form
from outrider.services.gateway.schemas.json_values import MAX_JSON_VALUES, JsonValues
from outrider.shared.base.errors import InvalidRequestError

MANY = "at most 40000 JSON values"
USER = {"role": "user", "content": "a"}


def answer(*arguments: Any) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize("value", [{"a": "\ud800"}, ["\ud800"], {"\ud800": 1}])
def test_json_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        JsonValues().check(value, "tools")


def test_deep_json_is_refused() -> None:
    value: Any = {}
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        JsonValues().check(value, "tools")


@pytest.mark.parametrize("value", [5, "text", None, {}, {"a": [1, {"b": "é"}], "c": 10**30, "d": 0.5}])
def test_other_values_pass(value: Any) -> None:
    JsonValues().check(value, "tools")
    assert JsonValues().read(json.dumps(value), "tools") == value


def test_texts_with_too_many_values_are_refused_unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(json_values.json, "loads", built.append)
    text = f'{{"a": [{",".join(["1"] * (MAX_JSON_VALUES + 1))}]}}'
    with pytest.raises(InvalidRequestError, match=MANY) as caught:
        JsonValues().read(text, "guided_json")
    assert caught.value.field == "guided_json"
    with pytest.raises(InvalidRequestError, match=MANY):
        schema_form(text, "guided_json")
    assert not built


def test_commas_inside_strings_do_not_count() -> None:
    value = {"a": ',"\\' * MAX_JSON_VALUES, "b": [1]}
    assert JsonValues().read(json.dumps(value), "tools") == value


@pytest.mark.parametrize("as_text", [True, False])
def test_the_arguments_of_all_tool_calls_count_together(as_text: bool) -> None:
    numbers: Any = {"a": [1] * (MAX_JSON_VALUES // 3)}
    numbers = json.dumps(numbers) if as_text else numbers
    fits = ChatRequest.model_validate({"messages": [USER, answer(numbers, numbers)]})
    assert len(fits.template_messages(10)) == 2
    body = {"messages": [USER, answer(numbers, numbers), USER, answer(numbers)]}
    with pytest.raises(InvalidRequestError, match=MANY) as caught:
        ChatRequest.model_validate(body).template_messages(10)
    assert caught.value.field == "messages.3.tool_calls.0.function.arguments"


def test_inputs_of_anthropic_calls_count_together() -> None:
    block = {"type": "tool_use", "id": "i", "name": "f", "input": {"a": [1] * (MAX_JSON_VALUES // 2)}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [block]}]
    body = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": turns * 2})
    with pytest.raises(InvalidRequestError, match=MANY):
        body.template_messages(10)


def test_a_schema_of_a_tool_has_a_limit() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * MAX_JSON_VALUES}}}
    with pytest.raises(InvalidRequestError, match=MANY):
        ChatRequest.model_validate({"messages": [USER], "tools": [tool]}).template_tools()


@pytest.mark.parametrize(
    "field",
    ['"logit_bias":{%s}', '"chat_template_kwargs":{%s}', '"tools":[{"function":{"parameters":{%s}}}]'],
)
def test_bodies_of_many_names_are_refused(field: str) -> None:
    names = ",".join(f'"{number}":1' for number in range(40_000))
    with pytest.raises(InvalidRequestError, match="names of fields, but at most 16384 are allowed"):
        parse_body(f'{{"messages":[],{field % names}}}'.encode())
