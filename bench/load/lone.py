"""An HTTP connection for latencies of a few milliseconds: one request at a time, with little overhead."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from ssl import SSLContext
from urllib.parse import urlsplit

from outrider.services.clients.server_trust import server_trust


@dataclass(frozen=True, slots=True)
class TimedReply:
    """A reply: seconds from sending the request until the whole reply has arrived, HTTP status, and body."""

    seconds: float
    status: int
    body: bytes


class LoneConnection:
    """One connection that sends one request at a time and blocks until its reply is complete.

    httpx takes more than a millisecond per request, and this class takes a few tenths of a millisecond.

    Args:
        url: Address of the server, without a trailing slash.
        headers: Headers of every request.
        timeout_s: Longest wait for a reply, in seconds.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        self._connection: HTTPConnection
        if isinstance(trust := server_trust(url), SSLContext):
            self._connection = HTTPSConnection(
                parts.hostname or "", parts.port, timeout=timeout_s, context=trust
            )
        else:
            self._connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        self._folder = parts.path
        self._headers = {"content-type": "application/json", **headers}

    def post(self, path: str, body: bytes) -> TimedReply:
        """Send a request and return the reply.

        Raises:
            OSError: The connection broke, or there was no reply in time.
            HTTPException: The reply is not valid HTTP.
        """
        started = time.perf_counter()
        self._connection.request("POST", self._folder + path, body, self._headers)
        response = self._connection.getresponse()
        data = response.read()
        return TimedReply(time.perf_counter() - started, response.status, data)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
