"""Base models of request bodies: `StrictModel` refuses unknown fields, and `OpenModel` collects them."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any, ClassVar

from pydantic import ConfigDict

from outrider.services.gateway.schemas.bounded import BoundedModel
from outrider.services.gateway.schemas.field_rules import NEUTRAL, REFUSED, is_neutral
from outrider.shared.base.errors import InvalidRequestError

_UNPRINTABLE = re.compile(r"[^\w.\-]", re.ASCII)
MAX_NAME_CHARS = 64
MAX_IGNORED_NAMES = 32
"""Number of ignored fields that a reply names.

With more names, the header would be longer than some clients accept.
"""

Neutral = Any
"""Type of an unsupported parameter.

Only values that ask for nothing are accepted. Errors name the parameter.
"""


class StrictModel(BoundedModel):
    """Base model that rejects unknown fields, NaN, and values of a wrong type (such as "1" for 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class OpenModel(StrictModel):
    """Base model that accepts unknown fields. The method `ignored_fields` checks and lists these fields.

    Declared fields are checked as strictly as in `StrictModel`.
    """

    model_config = ConfigDict(extra="allow")

    def ignored_fields(self, prefix: str = "") -> list[str]:
        """Return the names of the request fields that have no effect, including the fields of nested objects.

        Fields with neutral values, such as null or false, are left out.

        Args:
            prefix: Text to put before the names, such as ``messages.0.``.

        Returns:
            Names in printable ASCII characters, shortened to `MAX_NAME_CHARS` characters. At most
            `MAX_IGNORED_NAMES` + 1 names of each object.

        Raises:
            InvalidRequestError: If ignoring a field would change the generated text, or would leave requested
                data out of the reply.
        """
        extra = self.model_extra or {}
        for name in extra.keys() & REFUSED.keys():
            if not is_neutral(extra[name], REFUSED[name]):
                raise unsupported(prefix + name)
        ignored = (
            name
            for name, value in extra.items()
            if name not in REFUSED and not is_neutral(value, NEUTRAL.get(name, ()))
        )
        names = [
            _UNPRINTABLE.sub("?", prefix + name)[:MAX_NAME_CHARS]
            for name in islice(ignored, MAX_IGNORED_NAMES + 1)
        ]
        for name, value in self.__dict__.items():
            if isinstance(value, OpenModel):
                names += value.ignored_fields(f"{prefix}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], OpenModel):
                for number, one in enumerate(value):
                    names += one.ignored_fields(f"{prefix}{name}.{number}.")
        return names


class NeutralOnly(OpenModel):
    """A model with unsupported fields. `NEUTRAL` maps each such field to the values that it still accepts."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def refuse_unsupported(self, prefix: str = "") -> None:
        """Refuse a request with an unsupported field whose value would change the answer.

        The error, InvalidRequestError, names the first such field.

        Args:
            prefix: Text to put before the field's name in the error.
        """
        for name, neutral in self.NEUTRAL.items():
            if not is_neutral(getattr(self, name), neutral):
                raise unsupported(prefix + name)


def check_one_per_prompt(field: str, value: Any, num_prompts: int) -> None:
    """Refuse a list with one entry per prompt if its length differs from the number of prompts.

    Raises:
        InvalidRequestError: The error names the field.
    """
    if isinstance(value, list) and len(value) != num_prompts:
        raise InvalidRequestError(
            f"{field} has {len(value)} entries, but there are {num_prompts} prompts.", field=field
        )


def given(value: Any, field: str, name: str) -> Any:
    """Return a value that the object `field` of a request must contain as `name`.

    Raises:
        InvalidRequestError: The value is None.
    """
    if value is None:
        raise missing(f"{field}.{name}")
    return value


def missing(field: str) -> InvalidRequestError:
    """Return the error for a required field that a request leaves out."""
    return InvalidRequestError(f"Missing field: {field}.", field=field, reason="missing_field")


def unsupported(field: str) -> InvalidRequestError:
    """Return the error for a field that is refused."""
    return InvalidRequestError(
        f"{field} is not supported yet. Leave it out.", field=field, reason="unsupported_parameter"
    )
