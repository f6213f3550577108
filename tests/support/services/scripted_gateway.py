"""A small HTTP server in place of a gateway, for tests of terminal programs. The test scripts its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.services.json_handler import JsonHandler

WAIT_S = 20

ROUND = {
    "round": 1,
    "base_len": 5,
    "nodes": [
        {"token": 1, "parent": -1, "depth": 0, "logprob": 0.0, "text": "The"},
        {"token": 2, "parent": 0, "depth": 1, "logprob": -0.1, "text": " blue"},
        {"token": 3, "parent": 0, "depth": 1, "logprob": -3.0, "text": " red"},
    ],
    "accepted": [1],
    "emitted": [2, 4],
    "emitted_text": [" blue", " sky"],
    "draft_ms": 1.0,
    "verify_ms": 2.0,
}
END = {"accept_length": 2.0, "rounds": 1, "draft_tokens": 2, "accepted_tokens": 1, "fallback_reason": None}


class ScriptedGateway:
    """What the server answers and what it received.

    Attributes:
        bodies: Bodies of the chat requests.
        context: Length of the context. Each character of a message is one token.
        counts: True if the server has the route /tokenize.
        refused: Number of chat requests that were refused because they exceed the context.
        max_messages: Requests with more messages are refused, because the context is full.
        max_characters: Requests with a longer message are refused for the same reason.
        has_rounds: True if answers have a round with a draft.
        hold: If set, an answer stops before its end until the client disconnects.
        pauses: If set, an answer stops before its end until the test sets `released`.
        disconnected: Set when a client closed a held answer.
        status: Reply of GET /status.json; None for an error.
        advance: If set, each reply of GET /status.json is made by calling it with the number of the reply.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.context = 10_000
        self.counts = True
        self.refused = 0
        self.max_messages = 100
        self.max_characters = 1000
        self.has_rounds = True
        self.hold = False
        self.pauses = False
        self.released = threading.Event()
        self.disconnected = threading.Event()
        self.status: dict[str, Any] | None = None
        self.advance: Callable[[int], dict[str, Any]] | None = None
        self.num_status = 0


def _handler(script: ScriptedGateway) -> type[BaseHTTPRequestHandler]:
    class Handler(JsonHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.send_json(200, {"data": [{"id": "toy"}]})
            elif self.path == "/status.json" and script.status is not None:
                script.num_status += 1
                self.send_json(200, script.advance(script.num_status) if script.advance else script.status)
            else:
                self._error(404, "not_found", "This path does not exist.", None)

        def do_POST(self) -> None:
            body = self.read_json()
            texts = [one["content"] for one in body["messages"]] if "messages" in body else [body["prompt"]]
            num_tokens = sum(map(len, texts))
            if self.path == "/tokenize":
                if script.counts:
                    self.send_json(200, {"count": num_tokens, "max_model_len": script.context})
                else:
                    self._error(404, "not_found", "This path does not exist.", None)
                return
            if num_tokens + body.get("max_tokens", 1) > script.context:
                script.refused += 1
                self._error(400, "context_length_exceeded", "It does not fit.", "max_tokens")
                return
            script.bodies.append(body)
            longest = max(map(len, texts))
            if len(texts) > script.max_messages or longest > script.max_characters:
                self._error(400, "context_length_exceeded", "The prompt is too long.", "messages")
                return
            self.begin_events()
            self.send_event({"choices": [{"delta": {"content": "The"}}]})
            is_traced = script.has_rounds and body.get("speculation", {}).get("trace")
            traced = {"speculation": {"trace": [ROUND]}} if is_traced else {}
            self.send_event({"choices": [{"delta": {"content": " blue sky"}}], **traced})
            if script.pauses:
                script.released.wait(WAIT_S)
            if script.hold:
                self._wait_for_disconnect()
                return
            self.send_event({"choices": [{"delta": {}, "finish_reason": "stop"}], "speculation": END})
            self.send_event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _wait_for_disconnect(self) -> None:
            self.connection.settimeout(WAIT_S)
            if self.connection.recv(1) == b"":
                script.disconnected.set()

        def _error(self, status: int, code: str, message: str, field: str | None) -> None:
            self.send_json(status, {"error": {"message": message, "code": code, "param": field}})

    return Handler


def model_stats(running: int) -> dict[str, Any]:
    """Return the figures of one model in a status reply."""
    return {
        "running": running,
        "waiting": 1,
        "max_running_requests": 16,
        "generated_tokens": 0,
        "kv_pages": {"total": 100, "free": 75, "held": 25},
        "draft": {"state": "on", "algorithm": "EAGLE3"},
        "accept_length": 2.5,
    }


@contextmanager
def scripted_gateway() -> Iterator[tuple[ScriptedGateway, str]]:
    """Run the server. Yields its script and its address without a scheme."""
    script = ScriptedGateway()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(script)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield script, f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
