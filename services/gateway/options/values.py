"""Reads the options from the bodies of REST requests, with the names of the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from outrider.services.gateway.options.rows import RequestOption
from outrider.services.gateway.options.table import READ_OPTIONS
from outrider.shared.base.errors import InvalidRequestError

_REST_NAMES = tuple((option, option.rest_names) for option in READ_OPTIONS)


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The options of a request: the arguments of `Parameters`, and those of `RequestedRules`."""

    parameters: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)

    def put(self, option: RequestOption, value: Any) -> None:
        """Add the value of an option. None stands for its default."""
        values = self.rules if option.is_rule else self.parameters
        values[option.name] = option.default if value is None else value


def of_bodies(*bodies: BaseModel, prefix: str = "") -> OptionValues:
    """Read the options from the body of a REST request.

    Args:
        bodies: Parsed parts of the body. Each part may declare some of the fields.
        prefix: Text to put before field names in errors, except before the names of outer options.

    Raises:
        InvalidRequestError: Two fields of one option have different values.
    """
    values = OptionValues()
    declared = {name: getattr(body, name) for body in bodies for name in type(body).model_fields}
    for option, rest_names in _REST_NAMES:
        given = {name: declared[name] for name in rest_names if declared.get(name) is not None}
        first = next(iter(given.values()), None)
        if option.default is False:
            first = any(given.values())
        elif any(value != first for value in given.values()):
            names = [name if option.is_outer else prefix + name for name in given]
            raise InvalidRequestError(
                f"{names[0]} and {names[1]} differ. Set only one of them.", field=names[0]
            )
        values.put(option, tuple(first) if isinstance(first, list) else first)
    return values
