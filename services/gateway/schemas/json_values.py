"""Reads and checks JSON values: schemas of tools, arguments of tool calls, and forms of answers."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from outrider.services.gateway.parameters import check_prompt_text
from outrider.shared.base.errors import InvalidRequestError

# Templates print JSON recursively.
MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 40_000
"""Largest number of values that `JsonValues` accepts. The gateway needs up to 0.3 µs for each."""


class JsonValues:
    """Reads and checks JSON values, and limits their number over all calls: `MAX_JSON_VALUES`.

    The values inside objects and lists count. All messages of a request share one object of this class.
    """

    def __init__(self) -> None:
        self._left = MAX_JSON_VALUES

    def read(self, text: str, field: str) -> Any:
        """Parse a field whose text is JSON. The number of values is checked before the text is parsed.

        Args:
            text: The field's text.
            field: The field's name, for errors.

        Raises:
            InvalidRequestError: If the text has too many values.
            ValueError: If the text is not valid JSON.
            RecursionError: If the values are nested too deeply.
        """
        if text.count(",") >= self._left:
            # Commas inside strings do not separate values.
            plain = text.replace("\\\\", "").replace('\\"', "") if "\\" in text else text
            if "".join(plain.split('"')[::2]).count(",") >= self._left:
                raise _too_many(field)
        return json.loads(text)

    def check(self, value: object, field: str) -> None:
        """Refuse a value that is nested too deeply, has too many values or contains lone surrogates.

        Raises:
            InvalidRequestError: If the value is refused.
        """
        level: list[Any] = [value]
        for _ in range(MAX_JSON_DEPTH):
            parents = [one for one in level if isinstance(one, (dict, list))]
            if not parents:
                break
            self._left -= sum(map(len, parents))
            if self._left < 0:
                raise _too_many(field)
            level = [child for one in parents for child in (one.values() if isinstance(one, dict) else one)]
        else:
            raise InvalidRequestError(f"{field} is nested too deeply.", field=field)
        try:
            to_json(value)
        except (PydanticSerializationError, ValueError):
            check_prompt_text(json.dumps(value, ensure_ascii=False), field)


def _too_many(field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field}: at most {MAX_JSON_VALUES} JSON values are allowed, including those inside objects and "
        "lists. The arguments of all tool calls in the messages count together.",
        field=field,
    )
