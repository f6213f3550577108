"""Objects of requests that restrict the form of the answer, and their conversion to constraints."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from outrider.services.gateway.schemas.base import OpenModel, missing
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError

JsonSchema = dict[str, Any] | bool
ANY_OBJECT = '{"type": "object"}'


class JsonSchemaFormat(OpenModel):
    """OpenAI's `json_schema` object. Every schema is enforced exactly, whether or not `strict` is set."""

    name: str | None = None
    description: Any = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenModel):
    """The `response_format` object of OpenAI's chats."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def constraint(self, field: str) -> Constraint | None:
        """Return the constraint, or None if the format is plain text."""
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise missing(f"{field}.json_schema.schema")
        if self.type != "json_schema" or self.json_schema is None:
            return of_type(self.type, None, field)
        return of_type(self.type, self.json_schema.schema_, f"{field}.json_schema.schema")


class TextFormat(OpenModel):
    """The `format` object of OpenAI's responses and of Anthropic's messages."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: Any = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def constraint(self, field: str) -> Constraint | None:
        """Return the constraint, or None if the format is plain text."""
        if self.type == "json_schema" and self.schema_ is None:
            raise missing(f"{field}.schema")
        return of_type(self.type, self.schema_, f"{field}.schema" if self.type == "json_schema" else field)


class StructuredOutputs(OpenModel):
    """vLLM's `structured_outputs` object. At most one field is set."""

    json_: str | JsonSchema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def only_one(*found: Constraint | None) -> Constraint | None:
    """Return the only constraint among the arguments, or None if all arguments are None.

    Raises:
        InvalidRequestError: If several arguments are not None. The error names the field of the second one.
    """
    given = [one for one in found if one is not None]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{given[0].field} and {given[1].field} both demand a form of the answer. Set only one of them.",
            field=given[1].field,
        )
    return given[0] if given else None


def of_type(kind: str, schema: JsonSchema | None, field: str) -> Constraint | None:
    """Return the constraint of a format ``text``, ``json_object`` or ``json_schema``."""
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, field=field)
    return schema_form(schema, field) if kind == "json_schema" else None


def schema_form(value: str | JsonSchema | None, field: str) -> Constraint | None:
    """Return the constraint of a JSON schema, given as JSON or as text. None if there is no schema.

    Raises:
        InvalidRequestError: If the value is not a JSON schema.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = JsonValues().read(value, field)
        except (ValueError, RecursionError):
            value = None
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} must be a JSON schema, i.e. a JSON object.", field=field)
    JsonValues().check(value, field)
    return _checked(ConstraintKind.JSON_SCHEMA, json.dumps(value, ensure_ascii=False), field)


def text_form(kind: ConstraintKind, value: str | None, field: str) -> Constraint | None:
    """Return the constraint of a text such as a grammar. None if there is no text."""
    return _checked(kind, value, field) if value else None


def choice_form(value: list[str] | None, field: str) -> Constraint | None:
    """Return the constraint that allows only these texts. None if there are no texts."""
    return _checked(ConstraintKind.CHOICE, json.dumps(value), field) if value else None


def _checked(kind: ConstraintKind, source: str, field: str) -> Constraint:
    constraint = Constraint(kind, source, field=field)
    constraint.check()
    return constraint
