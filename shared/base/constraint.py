"""Output constraints: the form that a client demands (JSON schema, regular expression, grammar or choice)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum

from outrider.shared.base.errors import InvalidRequestError

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Constrained JSON has the white space of Python's `json.dumps`, so a model cannot emit endless white space.
"""
MAX_SOURCE_BYTES = 256 * 1024
MAX_CHOICES = 1024
MAX_MARKER_CHARS = 256


class ConstraintKind(Enum):
    """The kinds of constraints on an output. The kind determines the meaning of `Constraint.source`.

    Attributes:
        JSON_SCHEMA: A JSON schema, as JSON text.
        REGEX: A regular expression that the whole output matches.
        GRAMMAR: A grammar in EBNF (GBNF) or in Lark.
        CHOICE: A JSON list of texts. The output is one of these texts.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the output of a request: the form that the output's text must have.

    Attributes:
        kind: The kind of the constraint.
        source: The schema, expression, grammar or choices, as text.
        begins_after: Text, such as ``</think>``, that ends a free part of the output. The output must not end
            before this text, and the form begins after it. If `begins_after` is empty, the form begins with
            the first token.
        opening: Text, such as ``<think>``, that begins the free part. There is a free part only if the output
            begins with this text or the prompt ends with it. If `opening` is empty, there is always a free
            part.
        field: Name of the request field that the client used, for error messages.
    """

    kind: ConstraintKind
    source: str
    begins_after: str = ""
    opening: str = ""
    field: str = field(default="constraint", compare=False)

    def check(self) -> None:
        """Check that `source` is not empty, and that no text of the constraint is too large.

        Raises:
            InvalidRequestError: The constraint is empty or too large. The error names the field.
        """
        field = self.field
        size = len(self.source.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_SOURCE_BYTES:
            raise InvalidRequestError(
                f"{field} must have 1 to {MAX_SOURCE_BYTES} bytes, not {size}.", field=field
            )
        if max(len(self.begins_after), len(self.opening)) > MAX_MARKER_CHARS:
            raise InvalidRequestError(
                f"The markers of {field} must have at most {MAX_MARKER_CHARS} characters.", field=field
            )
        if self.kind is ConstraintKind.CHOICE:
            choices_of(self)


def choices_of(constraint: Constraint) -> list[str]:
    """Return the permitted texts of a constraint of kind `CHOICE`.

    Raises:
        InvalidRequestError: The source is not a list of 1 to `MAX_CHOICES` texts. The error names the field.
    """
    try:
        choices = json.loads(constraint.source)
    except (ValueError, RecursionError):
        choices = None
    if (
        not isinstance(choices, list)
        or not 1 <= len(choices) <= MAX_CHOICES
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise InvalidRequestError(
            f"{constraint.field} must be a list of 1 to {MAX_CHOICES} texts, none of them empty.",
            field=constraint.field,
        )
    return choices
