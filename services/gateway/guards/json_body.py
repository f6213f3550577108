"""Parses request bodies in bounded time, by limits on the objects, strings and numbers in a large body."""

from __future__ import annotations

import gc
import json
from typing import Any

from pydantic_core import from_json

from outrider.shared.base.errors import InvalidRequestError

LARGE_BODY = 64 * 1024
"""Size in bytes above which a body is checked before it is parsed."""
MAX_OBJECTS = 100_000
"""Largest number of objects and lists in a large body. Python needs at least 100 ns for each."""
MAX_STRINGS = 50_000
"""Largest number of strings in a large body, including the names of fields."""
MAX_NAMES = 16_384
"""Largest number of field names in a large body, over all objects.

The gateway needs about 2 µs for each, because parsing, validation and conversion create new objects.
"""
MAX_FRACTIONS = 100_000
"""Largest number of numbers with a decimal point in a large body."""
MAX_VALUES = 1_000_000
"""Largest number of commas between the values of a large body.

By default, no more prompt tokens than this number may wait in the queue.
"""
MAX_SHOWN_PATH = 256
"""Largest length of a field's name in an error."""
MAX_SLOW_COMMAS = 300_000
"""Number of commas in a large body up to which Python's parser is tried after the faster parser fails."""


def parse_body(body: bytes) -> Any:
    """Parse the JSON body of a request.

    Parsing 1 MiB of token ids or of text takes about 5 ms, and holds the GIL. A worker thread would therefore
    not help other requests.

    Raises:
        InvalidRequestError: If the body is not valid JSON, contains too many values, or has a text with a
            lone surrogate, which is half of a character. The latter error names the field.
    """
    # While a body creates many objects, the garbage collector would traverse them again and again.
    gc.disable()
    try:
        commas = _check_shape(body) if len(body) > LARGE_BODY else 0
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            # Python's parser is slower, but it explains errors better. It also accepts lone surrogates.
            if commas <= MAX_SLOW_COMMAS:
                parsed = _parse_exactly(body)
                _check_texts(parsed)
                return parsed
            raise _malformed(f"The body is not valid JSON: {error}.") from None
    finally:
        gc.enable()


def _check_shape(body: bytes) -> int:
    """Refuse a body with too many values before parsing it. Return the number of commas between values."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (quotes := body.count(b'"')) > 2 * MAX_STRINGS:
        raise _too_many("strings", quotes // 2, MAX_STRINGS)
    outside = b"".join(body.split(b'"')[::2])
    if (objects := outside.count(b"{") + outside.count(b"[")) > MAX_OBJECTS:
        raise _too_many("objects and lists", objects, MAX_OBJECTS)
    if (names := outside.count(b":")) > MAX_NAMES:
        raise _too_many("names of fields", names, MAX_NAMES)
    if (fractions := outside.count(b".")) > MAX_FRACTIONS:
        raise _too_many("numbers with a decimal point", fractions, MAX_FRACTIONS)
    if (commas := outside.count(b",")) > MAX_VALUES:
        raise _too_many("values", commas, MAX_VALUES)
    return commas


def _parse_exactly(body: bytes) -> Any:
    """Return the body as parsed by Python's parser.

    Refuse NaN and Infinity, which this parser would accept.
    """
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _malformed(f"The body is not valid JSON: {error}.") from None
    except UnicodeDecodeError:
        raise _malformed("The body is not valid JSON: it is not UTF-8 text.") from None
    except RecursionError:
        raise _malformed("The body cannot be read: it is nested too deeply.") from None
    except ValueError:
        raise _malformed("The body cannot be read: a number in it has too many digits.") from None


def _check_texts(body: Any) -> None:
    """Refuse a body with a lone surrogate in any text, because such a text cannot be written as UTF-8."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            _check_text(value, path)
        elif isinstance(value, dict):
            for name in value:
                _check_text(name, path)
            left += [(f"{path}.{name}"[:MAX_SHOWN_PATH], one) for name, one in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}.{number}", one) for number, one in enumerate(value)]


def _check_text(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        field = path[1:] or "The body"
        raise InvalidRequestError(
            f"{field} contains a lone surrogate, which is not valid text.", field=path[1:] or None
        ) from None


def _refuse_constant(name: str) -> None:
    raise _malformed(f"The body is not valid JSON: {name} is not a JSON value.")


def _malformed(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="malformed_json")


def _too_many(kind: str, number: int, most: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body has {number} {kind}, but at most {most} are allowed. Send several requests.",
        reason="malformed_json",
    )
