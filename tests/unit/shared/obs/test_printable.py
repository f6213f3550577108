"""Texts of clients and other programs cannot forge lines or move the terminal's cursor."""

from __future__ import annotations

import io
import logging

import pytest

from outrider.shared.obs.logging import configure_logging, get_logger
from outrider.shared.obs.printable import printable


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain\ttext, Grüße, 日本", "plain\ttext, Grüße, 日本"),
        ("a\nforged", r"a\nforged"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("a\u2028b\u202ec", r"a\u2028b\u202ec"),
    ],
)
def test_control_characters_are_escaped(text: str, safe: str) -> None:
    assert printable(text) == safe


def test_log_lines_escape_events_and_fields() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        configure_logging("toy", "info", stream=stream)
        get_logger("outrider.test").info("one\nFORGED", path="x\x1b[2J")
        logging.getLogger("outrider.other").warning("two %s", "a\nFORGED")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert len(stream.getvalue().splitlines()) == 2
    assert "\x1b" not in stream.getvalue()
