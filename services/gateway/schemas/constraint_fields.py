"""Converts the request fields that restrict the form of the answer, of OpenAI, vLLM and SGLang."""

from __future__ import annotations

from outrider.services.gateway.schemas.constraint_types import (
    StructuredOutputs,
    choice_form,
    of_type,
    only_one,
    schema_form,
    text_form,
)
from outrider.services.gateway.schemas.option_fields.openai import OpenAIFormFields
from outrider.services.gateway.schemas.option_fields.sampling import FormFields
from outrider.shared.base.constraint import Constraint, ConstraintKind


class SglangForms(FormFields):
    """The constraint of SGLang's fields."""

    def constraint(self, prefix: str = "") -> Constraint | None:
        """Return the constraint on the output that the request's fields demand, or None if no field is set.

        Args:
            prefix: Text to put before field names in errors.

        Raises:
            InvalidRequestError: If two fields are set, or a field is malformed. The error names a field.
        """
        return only_one(
            schema_form(self.json_schema, f"{prefix}json_schema"),
            text_form(ConstraintKind.REGEX, self.regex, f"{prefix}regex"),
            text_form(ConstraintKind.GRAMMAR, self.ebnf, f"{prefix}ebnf"),
        )


class OpenAIForms(OpenAIFormFields, SglangForms):
    """The constraint of the fields of OpenAI, vLLM and SGLang."""

    def constraint(self, prefix: str = "") -> Constraint | None:
        """Return the constraint that the fields demand, or None if no field is set."""
        form = self.response_format
        given, name = self.structured_outputs or StructuredOutputs(), f"{prefix}structured_outputs."
        return only_one(
            super().constraint(prefix),
            None if form is None else form.constraint(f"{prefix}response_format"),
            schema_form(given.json_, f"{name}json"),
            of_type("json_object", None, f"{name}json_object") if given.json_object else None,
            text_form(ConstraintKind.REGEX, given.regex, f"{name}regex"),
            text_form(ConstraintKind.GRAMMAR, given.grammar, f"{name}grammar"),
            choice_form(given.choice, f"{name}choice"),
            schema_form(self.guided_json, f"{prefix}guided_json"),
            text_form(ConstraintKind.REGEX, self.guided_regex, f"{prefix}guided_regex"),
            text_form(ConstraintKind.GRAMMAR, self.guided_grammar, f"{prefix}guided_grammar"),
            choice_form(self.guided_choice, f"{prefix}guided_choice"),
        )
