"""A small Hugging Face hub on a local port: the requests that a snapshot download makes, and its failures."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class HubRepository:
    """A repository of the hub.

    Attributes:
        files: Name → content.
        token: Access token that a reader needs for the files, or empty. Without it, the repository is gated.
        branches: Branches and tags that exist.
        cut: Names of files whose transfer breaks off in the middle.
    """

    files: dict[str, bytes]
    token: str = ""
    branches: tuple[str, ...] = ("main",)
    cut: set[str] = field(default_factory=set)

    @property
    def commit(self) -> str:
        """Hash that stands for the current content."""
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """A running hub.

    Attributes:
        url: Its address.
        repositories: ``ORG/NAME`` → repository.
        downloaded: Names of the files that were sent, in order.
        requests: Number of requests of any kind.
    """

    url: str
    repositories: dict[str, HubRepository] = field(default_factory=dict)
    downloaded: list[str] = field(default_factory=list)
    requests: int = 0


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve an empty hub until the block ends."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Requests) as server:
        server.daemon_threads = True
        hub = Hub(f"http://127.0.0.1:{server.server_port}")
        server.hub = hub  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Requests(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(send_body=True)

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def log_message(self, *_: object) -> None:
        """Suppress the request log."""

    def _answer(self, send_body: bool) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.requests += 1
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        if api:
            parts = parts[2:]
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = hub.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")
            return
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in (*repository.branches, repository.commit):
            self._refuse(404, "RevisionNotFound")
            return
        if api and rest[:1] == ["tree"]:
            self._json([_listed(file, content) for file, content in repository.files.items()])
        elif api:
            siblings = [{"rfilename": file} for file in repository.files]
            self._json({"id": name, "sha": repository.commit, "siblings": siblings, "tags": []})
        elif repository.token and self.headers.get("authorization") != f"Bearer {repository.token}":
            self._refuse(403, "GatedRepo")
        else:
            self._file(hub, repository, "/".join(rest[2:]), send_body)

    def _file(self, hub: Hub, repository: HubRepository, name: str, send_body: bool) -> None:
        content = repository.files[name]
        self.send_response(200)
        self.send_header("x-repo-commit", repository.commit)
        self.send_header("etag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if send_body:
            hub.downloaded.append(name)
            self.wfile.write(content[: len(content) // 2] if name in repository.cut else content)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("x-error-message", code)
        self.send_header("content-length", "0")
        self.end_headers()


def _listed(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
