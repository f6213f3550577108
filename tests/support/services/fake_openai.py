"""A small HTTP server that answers as an OpenAI-compatible server, or as an Outrider gateway, would."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Refusal = tuple[int, dict[str, Any]]
PIECE_S = 0.0005
"""Pace of a stream, so that a stream is still running when a test's next request is answered."""


class FakeServer:
    """Answers every request with as many tokens as it asks for. Tests change the attributes.

    Attributes:
        owner: `owned_by` of the model. ``outrider`` adds the routes of an Outrider gateway.
        refuse: Returns (status, body) for a request to refuse, or None.
        with_usage: Report token counts.
        with_text: Give each piece of a stream a text.
        metrics: Body of ``/metrics``. None answers 404.
        limits: Further entries of the model, of ``/model_info`` and of ``/server_info``.
        seen: (path, body) of every request.
        keys: Authorization header of every request.
    """

    def __init__(self, owner: str = "vllm") -> None:
        self.owner = owner
        self.refuse: Callable[[dict[str, Any]], Refusal | None] = lambda body: None
        self.with_usage = True
        self.with_text = True
        self.metrics: str | None = None
        self.limits: dict[str, Any] = {}
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        fake = self

        class Handler(_Handler):
            server_of = fake

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.seen]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # a batch of requests connects at once


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.server_of
        fake.keys.add(self.headers.get("authorization"))
        model = {"id": "toy", "owned_by": fake.owner, **fake.limits}
        if self.path == "/v1/models":
            self._reply(200, {"data": [model]})
        elif self.path in ("/model_info", "/server_info") and fake.owner == "outrider":
            self._reply(200, fake.limits)
        elif self.path == "/metrics" and fake.metrics is not None:
            self._begin(200, "text/plain")
            self.wfile.write(fake.metrics.encode())
        else:
            self._reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        fake = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        fake.keys.add(self.headers.get("authorization"))
        native = self.path == "/generate"
        if native and fake.owner != "outrider":
            self._reply(404, {"detail": "Not Found"})
            return
        fake.seen.append((self.path, body))
        if (refused := fake.refuse(body)) is not None:
            self._reply(*refused)
            return
        tokens = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        if not body.get("stream"):
            self._reply(200, self._native(tokens) if native else self._whole(tokens))
            return
        self._begin(200, "text/event-stream")
        events = self._native_events(tokens) if native else self._events(tokens, "messages" in body)
        with contextlib.suppress(OSError):  # the client has cancelled the request
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
                time.sleep(PIECE_S)
            self.wfile.write(b"data: [DONE]\n\n")

    def _native(self, tokens: int) -> dict[str, Any]:
        return {"text": "", "output_ids": [7] * tokens, "meta_info": {"completion_tokens": tokens}}

    def _native_events(self, tokens: int) -> Iterator[dict[str, Any]]:
        for count in range(1, tokens + 1):
            yield self._native(count)

    def _whole(self, tokens: int) -> dict[str, Any]:
        return {"choices": [{"text": "x" * tokens}], **self._usage(tokens)}

    def _usage(self, tokens: int) -> dict[str, Any]:
        return {"usage": {"completion_tokens": tokens}} if self.server_of.with_usage else {}

    def _events(self, tokens: int, chat: bool) -> Iterator[dict[str, Any]]:
        text = "x" if self.server_of.with_text else ""
        if chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for index in range(tokens):
            piece = {"delta": {"content": text}} if chat else {"text": text}
            yield {"choices": [{**piece, "finish_reason": "length" if index == tokens - 1 else None}]}
        if self.server_of.with_usage:
            yield {"choices": [], **self._usage(tokens)}

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        self._begin(status, "application/json")
        self.wfile.write(json.dumps(body).encode())

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()
