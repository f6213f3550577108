"""Helpers that the routes share: access to the core, the client's deadline, and common fields of replies."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any, cast

from fastapi import Request

from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.schemas.base import MAX_IGNORED_NAMES, OpenModel
from outrider.services.gateway.served_target import ServedTarget
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.obs.logging import get_logger

DEADLINE_HEADER = "X-Request-Deadline-Ms"
IGNORED_HEADER = "X-Outrider-Ignored"
_log = get_logger("outrider.gateway.http")

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is invalid; the error names it."},
    401: {"description": "The API key is missing or invalid."},
    404: {"description": "Unknown model."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is not JSON."},
    429: {"description": "The server is overloaded; retry after the time in Retry-After."},
    500: {"description": "Internal error."},
    503: {"description": "The server is not ready or is shutting down."},
    504: {"description": "The deadline passed."},
}


def core_of(request: Request) -> GatewayCore:
    """Return the core of the application that serves `request`."""
    return cast(GatewayCore, request.app.state.core)


def timeout_of(request: Request) -> float | None:
    """Return the client's time limit for a request in seconds. None if there is no deadline header.

    Raises:
        InvalidRequestError: If the header is not a positive number of milliseconds.
    """
    value = request.headers.get(DEADLINE_HEADER)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= len(value) <= 9 or int(value) == 0:
        raise InvalidRequestError(
            f"{DEADLINE_HEADER} must be a positive number of milliseconds.", field=DEADLINE_HEADER
        )
    return int(value) / 1e3


def ignored_header(body: OpenModel) -> dict[str, str]:
    """Return a reply header that lists the request fields without effect. Also log a warning with this list.

    Returns:
        The header, as a mapping from its name to its value. Empty if every field has an effect.

    Raises:
        InvalidRequestError: If ignoring a field would change the generated text, or would leave requested
            data out of the reply.
    """
    names = body.ignored_fields()
    if not names:
        return {}
    listed = ",".join([*names[:MAX_IGNORED_NAMES], *["..."][: len(names) > MAX_IGNORED_NAMES]])
    _log.warning("request fields ignored", fields=listed)
    return {IGNORED_HEADER: listed}


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The fields that all chunks of one reply share."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str | None = None

    @classmethod
    def new(
        cls, prefix: str, kind: str, model: str, rid: str | None, info: ServedTarget | None = None
    ) -> ReplyHead:
        """Create the fields that all chunks of a reply share, for a reply that begins now.

        The reply uses `rid`, the id that the client sent. With `rid` None, the reply gets a new id. With
        `info`, the reply contains OpenAI's `system_fingerprint`: the version of the weights.
        """
        fingerprint = None if info is None else info.weight_version
        return cls(rid or f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model, fingerprint)

    def object_of(self, **fields: Any) -> dict[str, Any]:
        """Return a reply or chunk with these additional fields."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return head | ({} if self.fingerprint is None else {"system_fingerprint": self.fingerprint}) | fields
