"""The chat template's variables that clients may set in the field `chat_template_kwargs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.services.gateway.parameters import check_prompt_text
from outrider.shared.base.errors import InvalidRequestError

# Other variables could insert text outside the client's messages.
TEMPLATE_OPTIONS = ("enable_thinking", "thinking", "reasoning_effort")
MAX_VALUE_CHARS = 64


def template_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check and return the variables that a client has set for the chat template.

    Raises:
        InvalidRequestError: If a key is not allowed, or a value is not a scalar.
    """
    options = dict(given or {})
    for key, value in options.items():
        field = f"chat_template_kwargs.{key}"
        if key not in TEMPLATE_OPTIONS:
            raise InvalidRequestError(
                f"{field} is not allowed. Allowed keys: {', '.join(TEMPLATE_OPTIONS)}.", field=field
            )
        if not isinstance(value, (str, bool, int)) or (
            isinstance(value, str) and len(value) > MAX_VALUE_CHARS
        ):
            raise InvalidRequestError(
                f"{field} must be a boolean, an integer or a string of at most {MAX_VALUE_CHARS} characters.",
                field=field,
            )
        if isinstance(value, str):
            check_prompt_text(value, field)
    return options
