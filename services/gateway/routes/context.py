"""What routes find in the request: the core, deadlines, ids."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any, cast

from fastapi import Request

from outrider.services.gateway.core import GatewayCore
from outrider.shared.base.errors import InvalidRequestError

DEADLINE_HEADER = "X-Request-Deadline-Ms"

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; the error names it."},
    401: {"description": "No valid API key."},
    404: {"description": "Unknown model."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is not JSON."},
    429: {"description": "Overloaded; Retry-After says when to come back."},
    500: {"description": "Our fault."},
    503: {"description": "Not ready or shutting down."},
    504: {"description": "The deadline passed."},
}


def core_of(request: Request) -> GatewayCore:
    """Return the core of the application that serves `request`."""
    return cast(GatewayCore, request.app.state.core)


def timeout_of(request: Request) -> float | None:
    """Return the client's deadline in seconds, if its header gives one."""
    value = request.headers.get(DEADLINE_HEADER)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= len(value) <= 9 or int(value) == 0:
        raise InvalidRequestError(
            f"{DEADLINE_HEADER} must be a positive number of milliseconds.", field=DEADLINE_HEADER
        )
    return int(value) / 1e3


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all chunks of one reply share."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, rid: str | None) -> ReplyHead:
        """Make the head of a reply that begins now; a client's own id is kept."""
        return cls(rid or f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)

    def object_of(self, **fields: Any) -> dict[str, Any]:
        """Return a reply or chunk."""
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model, **fields}
