"""Bounds the work for malformed bodies: the check of a list stops at its first error, and lists have caps."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

MAX_FIELDS = 256
"""Largest number of fields in one JSON object, for a model that refuses unknown fields.

Each unknown field of such an object would cause an error.
"""
MAX_ITEMS = 4096
"""Largest number of items of a list. There is no such limit for lists of token ids, because the limit of the
body's size bounds these lists."""


def _bound_lists(schema: Any) -> None:
    """Make every list in `schema` stop at its first error, and cap its length. Change `schema` in place."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
            if schema.get("items_schema", {}).get("type") not in ("int", None):
                schema.setdefault("max_length", MAX_ITEMS)
        for part in schema.values():
            _bound_lists(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _bound_lists(part)


class BoundedModel(BaseModel):
    """A pydantic model against which any request body can be validated at low cost.

    By default, pydantic reports one error for each invalid item. A body of 1 MiB could cause hundreds of
    thousands of errors. These would block the event loop for seconds and take gigabytes of memory.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound_lists(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        forbids = cls.model_config.get("extra") == "forbid"
        if forbids and isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"has {len(data)} fields, but at most {MAX_FIELDS} are allowed")
        return data
