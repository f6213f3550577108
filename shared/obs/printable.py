"""Escapes control characters, so that text from clients and other programs cannot forge log lines."""

from __future__ import annotations

import re

# Control characters (C0 without tab, DEL, C1), line separators, and marks that reorder or hide text.
_UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def printable(text: str) -> str:
    r"""Return `text` with its control characters replaced by escapes such as ``\x1b``. Tabs stay."""
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
