"""Detects requests of ambiguous length. A proxy and this server could disagree where such a request ends."""

from __future__ import annotations

from starlette.types import Scope


def ambiguous_framing(scope: Scope) -> bool:
    """Return True if a request has both Content-Length and Transfer-Encoding (RFC 9112, section 6.1)."""
    names = {name for name, _value in scope["headers"]}
    return b"content-length" in names and b"transfer-encoding" in names
