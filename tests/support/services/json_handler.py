"""The base class of HTTP servers in tests that reply with JSON and with server-sent events."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Handles requests without a log of them."""

    def log_message(self, *_: object) -> None:
        pass

    def read_json(self) -> Any:
        """Return the body of the request."""
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def send_json(self, status: int, body: dict[str, Any]) -> None:
        """Send a complete reply."""
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def begin_events(self) -> None:
        """Begin a reply that consists of events."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()

    def send_event(self, event: dict[str, Any]) -> None:
        """Send one event."""
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()
