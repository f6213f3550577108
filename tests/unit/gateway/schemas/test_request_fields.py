"""The table of request fields in docs/api.md agrees with the models and with the clients' own definitions.

Request models take only fields of the table of options.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from support.suite.scripts import import_script

from outrider.services.gateway.options.table import OPTIONS
from outrider.services.gateway.schemas.base import OpenModel
from outrider.services.gateway.schemas.field_rules import ALWAYS_NEUTRAL, NEUTRAL, REFUSED, is_neutral

ROOT = Path(__file__).resolve().parents[4]
GENERATED = "outrider.services.gateway.schemas.option_fields."


SCRIPT = import_script("request_fields")


def test_the_page_contains_the_table_of_the_code() -> None:
    assert SCRIPT.main(["--check"]) == 0, "run: python scripts/request_fields.py"


def test_every_version_of_the_table_is_in_the_changelog() -> None:
    versions = set(re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert {SCRIPT.FIRST_RELEASE, SCRIPT.UNRELEASED.capitalize()} == versions, (
        "add a list for the new release"
    )
    rows = [line.split(" | ") for line in SCRIPT.table().splitlines()[2:]]
    assert {row[2] for row in rows} == {SCRIPT.FIRST_RELEASE, SCRIPT.UNRELEASED}


def test_what_the_first_release_took_is_still_taken() -> None:
    for route, model, _apis in SCRIPT.ROUTES:
        for name in SCRIPT.OF_FIRST_RELEASE.get(route, ()):
            assert SCRIPT.field_status(model, name) in ("taken", "no effect"), (route, name)
    assert SCRIPT.since("/v1/completions", "taken", "echo") == "0.1.0"
    assert SCRIPT.since("/v1/completions", "taken", "logprobs") == "unreleased"
    assert SCRIPT.since("/v1/completions", "refused", "suffix") == "0.1.0"
    assert SCRIPT.since("/v1/responses", "taken", "input") == "unreleased"


@pytest.mark.parametrize(
    ("listed", "params"),
    [
        (SCRIPT.OPENAI_CHAT, chat_create_params.CompletionCreateParamsBase),
        (SCRIPT.OPENAI_RESPONSES, response_create_params.ResponseCreateParamsBase),
        (SCRIPT.ANTHROPIC, message_create_params.MessageCreateParamsBase),
        (SCRIPT.OPENAI_COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_clients_is_listed(listed: list[str], params: type) -> None:
    assert set(params.__annotations__) <= set(listed)


def test_a_field_has_one_rule() -> None:
    assert not REFUSED.keys() & NEUTRAL.keys()
    for _route, model, _apis in SCRIPT.ROUTES:
        assert not {*getattr(model, "NO_EFFECT", ())} - model.model_fields.keys()


@pytest.mark.parametrize(
    ("value", "neutral", "expected"),
    [
        (None, (), True),
        (False, (), True),
        (0, (), False),
        (1, (1,), True),
        (True, (1,), False),
        (1.0, (1,), False),
        ("x", (), False),
        ([0], (), False),
    ],
)
def test_neutral_values_have_the_same_type(value: object, neutral: tuple[Any, ...], expected: bool) -> None:
    assert is_neutral(value, neutral) is expected
    assert all(is_neutral(one, neutral) for one in ALWAYS_NEUTRAL)


def test_names_of_nested_fields_have_a_path() -> None:
    class Inner(OpenModel):
        pass

    class Outer(OpenModel):
        one: Inner
        many: list[Inner]

    made = Outer.model_validate({"one": {"a": 1}, "many": [{}, {"b": 1, "c": None}], "d": 1})
    assert made.ignored_fields() == ["d", "one.a", "many.1.b"]


@pytest.mark.parametrize(("route", "model"), [(route, model) for route, model, _apis in SCRIPT.ROUTES])
def test_a_route_takes_only_options_of_the_table(route: str, model: type[OpenModel]) -> None:
    places = {place.split(".")[0] for option in OPTIONS for place in option.objects}
    written_by_hand = {
        f"{route}:{name}"
        for name in model.model_fields
        if SCRIPT.field_status(model, name) == "taken" and not declared_in(model, name).startswith(GENERATED)
    }
    assert written_by_hand <= places, (
        "add them to the table in services/gateway/options, and run: python scripts/option_sources.py"
    )


def declared_in(model: type[OpenModel], name: str) -> str:
    """Return the module of the class that declares a field."""
    return next(one.__module__ for one in model.__mro__ if name in inspect.get_annotations(one))


def test_the_table_names_existing_fields_of_objects() -> None:
    models: dict[str, type[BaseModel]] = {route: model for route, model, _apis in SCRIPT.ROUTES}
    for place in (place for option in OPTIONS for place in option.objects):
        route, _, path = place.partition(":")
        model = models[route]
        for name in path.split("."):
            types = [one for one in get_args(model.model_fields[name].annotation) if isinstance(one, type)]
            model = next((one for one in types if issubclass(one, BaseModel)), model)
