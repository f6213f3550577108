"""Loads the static files of the playground, with headers that stop browsers from contacting other hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGES = {"/": "index.html", "/status": "status.html"}
"""Files of the two pages, by path. Every other file has the path /playground/NAME."""

BODY, NEEDS_KEY = b"<body>", b"<body data-needs-key>"
"""Start of a page's body, without and with the mark by which its script asks for an API key first."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file: its content, its media type, and the ETag that lets browsers reuse an unchanged file."""

    content: bytes
    media_type: str
    etag: str


def load_files(*, needs_key: bool = False) -> Mapping[str, StaticFile]:
    """Return every static file of this folder, by path. Clients cannot request any other file.

    Args:
        needs_key: True for pages that ask for an API key before they call the gateway.
    """
    paths = {
        f"/playground/{file.name}": file
        for file in sorted(FOLDER.iterdir())
        if file.suffix in TYPES and file.name not in PAGES.values()
    }
    paths |= {path: FOLDER / name for path, name in PAGES.items()}
    return {path: _load(file, needs_key and path in PAGES) for path, file in paths.items()}


def _load(file: Path, needs_key: bool) -> StaticFile:
    content = file.read_bytes()
    if needs_key:
        content = content.replace(BODY, NEEDS_KEY, 1)
    return StaticFile(content, TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')
