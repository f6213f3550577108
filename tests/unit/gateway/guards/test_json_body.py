"""Large bodies are parsed like small ones. Bodies of too many values are refused before they are built."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.services.gateway.guards import json_body
from outrider.services.gateway.guards.json_body import LARGE_BODY, parse_body
from outrider.shared.base.errors import InvalidRequestError

FILL = "x" * LARGE_BODY


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [1, 2, 3], "text": 'quotes " and \\ backslashes \\" é \u2028 \x00'},
        {"seed": 2**63 - 1, "large": 10**30, "small": -(10**30)},
        {"float": 0.1, "exponent": 1e-300, "true": True, "null": None, "nested": [[[{}]]]},
        {"pair": "\U0001f600", "escaped": "\\ud800"},
        [],
    ],
)
@pytest.mark.parametrize("size", [0, LARGE_BODY])
def test_large_and_small_bodies_have_the_same_values(value: Any, size: int) -> None:
    body = json.dumps({"value": value, "fill": "x" * size}).encode()
    assert parse_body(body)["value"] == value


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"user": "\ud800"}, "user"),
        ({"structured_outputs": {"regex": "a\udfff"}}, "structured_outputs.regex"),
        ({"stop": ["a", "b", "\ud800"]}, "stop.2"),
        ({"metadata": {"\ud800": 1}}, "metadata"),
        ({"\ud800": 1}, None),
        ("\ud800", None),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_half_a_character_is_refused_with_the_name_of_its_field(
    value: Any, field: str | None, raw: bool
) -> None:
    body = json.dumps(value, ensure_ascii=not raw).encode("utf-8", "surrogatepass")
    with pytest.raises(InvalidRequestError, match="contains a lone surrogate") as caught:
        parse_body(body)
    assert caught.value.field == field


def test_the_last_of_two_equal_names_counts() -> None:
    assert parse_body(f'{{"a": 1, "a": 2, "fill": "{FILL}"}}'.encode())["a"] == 2


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ("[1]", "objects and lists"),
        ("{}", "objects and lists"),
        ('"a"', "strings"),
        ("1.5", "numbers with a decimal point"),
        ("1", "values"),
    ],
)
def test_too_many_values_are_refused_unbuilt(monkeypatch: pytest.MonkeyPatch, items: str, named: str) -> None:
    built: list[bytes] = []
    monkeypatch.setattr(json_body, "from_json", lambda body, **_: built.append(body))
    monkeypatch.setattr(json_body, "_parse_exactly", built.append)
    with pytest.raises(InvalidRequestError, match=f"{named}, but at most"):
        parse_body(f'{{"prompt": [{",".join([items] * 1_100_000)}]}}'.encode())
    assert not built


def test_brackets_and_quotes_inside_texts_do_not_count() -> None:
    text = '[{".' * 300_000 + '"' * 500_000
    assert parse_body(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_token_ids_may_be_many() -> None:
    ids = list(range(400_000))
    assert parse_body(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (b"NaN}", "NaN is not a JSON value"),
        (b"1,}", "The body is not valid JSON"),
        (b"9" * 5000 + b"}", "too many digits"),
        (b"[" * 5000, "nested too deeply"),
        (b'"\xff"}', "not UTF-8"),
    ],
)
@pytest.mark.parametrize("commas", [0, json_body.MAX_SLOW_COMMAS])
def test_malformed_bodies_are_refused(end: bytes, message: str, commas: int) -> None:
    ids = b"1," * commas + b"1"
    body = b'{"ids": [' + ids + b'], "fill": "' + FILL.encode() + b'", "end": ' + end
    with pytest.raises(
        InvalidRequestError, match="The body is not valid JSON" if commas else message
    ) as caught:
        parse_body(body)
    assert caught.value.reason == "malformed_json"
