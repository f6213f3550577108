"""Keeps the latest error replies in memory, for the operator's page, and counts all of them by reason."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from outrider.shared.base.errors import OutriderError

MAX_ERRORS = 50
MAX_MESSAGE_CHARS = 300


@dataclass(slots=True)
class RecentError:
    """One error reply of the gateway, or several equal error replies in a row.

    Attributes:
        at: Time of the latest occurrence, in seconds since 1970.
        route: Path pattern of the request, such as /v1/chat/completions, or the full name of a gRPC method.
        status: HTTP status of the reply. For a gRPC call, the HTTP status that corresponds to the error.
        reason: Machine-readable reason.
        message: Message that the client received, shortened to `MAX_MESSAGE_CHARS` characters.
        request_id: Id of the latest request.
        count: Number of equal errors in a row.
    """

    at: float
    route: str
    status: int
    reason: str
    message: str
    request_id: str
    count: int = 1


class RecentErrors:
    """The latest `MAX_ERRORS` errors.

    Equal errors in a row form one entry. A flood of equal errors therefore does not displace other errors.

    Args:
        count: Called with the reason of each error.
    """

    def __init__(self, count: Callable[[str], None] = lambda reason: None) -> None:
        self._count = count
        self._errors: deque[RecentError] = deque(maxlen=MAX_ERRORS)

    def record(self, error: OutriderError, route: str, request_id: str) -> None:
        """Add one error reply."""
        self._count(error.reason)
        now = time.time()
        message = error.message[:MAX_MESSAGE_CHARS]
        latest = self._errors[-1] if self._errors else None
        if latest and (latest.route, latest.status, latest.reason, latest.message) == (
            route,
            error.code.value,
            error.reason,
            message,
        ):
            latest.at, latest.request_id, latest.count = now, request_id, latest.count + 1
            return
        self._errors.append(RecentError(now, route, error.code.value, error.reason, message, request_id))

    def newest_first(self) -> list[dict[str, Any]]:
        """Return the errors as JSON objects."""
        return [asdict(one) for one in reversed(self._errors)]
