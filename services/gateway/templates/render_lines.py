"""The lines of JSON that the gateway and `render_process` exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_OUTPUT_CHARS = 4 * 1024 * 1024
"""Largest number of characters of a rendered chat."""
MAX_REPLY_BYTES = 12 * MAX_OUTPUT_CHARS + 16 * 1024
"""Largest size of a reply. JSON writes a character as at most 12 bytes."""


def template_line(source: str, special_tokens: Mapping[str, str]) -> bytes:
    """Return the first request, which contains the template's source and its special tokens."""
    return json.dumps([source, dict(special_tokens)]).encode() + b"\n"


def chat_line(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], generate: bool) -> bytes:
    """Return the request to render a chat. The arguments are those of `ChatTemplate.render`."""
    return json.dumps([list(messages), dict(options), generate]).encode() + b"\n"


def reply_line(text: str, error: str) -> bytes:
    """Return a reply: the rendered text, or the message of an error."""
    return json.dumps([text, error]).encode() + b"\n"


def read_reply(line: bytes) -> tuple[str, str]:
    """Return the text of a reply and its error. One of the two is empty."""
    text, error = json.loads(line)
    return str(text), str(error)
