"""Types of request fields with special checks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from outrider.services.gateway.parameters import MAX_SALT_CHARS


def _one_or_many(value: object) -> object:
    """Accept one string or a list, and return a list. Raise a single clear error for any other value.

    pydantic itself would report one error for each type of the union.
    """
    if value is None:
        return None
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, list) or not all(isinstance(one, str) for one in many):
        raise ValueError("must be a string or a list of strings")
    return many


def _one_id_or_many(value: object) -> object:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _checked_salts(value: str | list[str]) -> str | list[str]:
    for salt in [value] if isinstance(value, str) else value:
        if len(salt) > MAX_SALT_CHARS:
            raise ValueError(f"must have at most {MAX_SALT_CHARS} characters")
    return value


StopStrings = Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]
TokenIds = Annotated[list[int], BeforeValidator(_one_id_or_many, json_schema_input_type=int | list[int])]
StartLength = Annotated[int, Field(ge=-1)]
ExpertsStart = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Salt = Annotated[str, AfterValidator(_checked_salts)]
Salts = Annotated[str | list[str], AfterValidator(_checked_salts)]
RequestName = Annotated[str, Field(max_length=128)]
Truncation = Literal["auto", "disabled"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
