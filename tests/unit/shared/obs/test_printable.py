"""Texts of clients and other programs cannot forge lines or move the terminal's cursor."""

from __future__ import annotations

import io
import json
import logging
import re

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


def test_lines_are_short_in_text_and_complete_in_json() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    lines = {}
    try:
        for as_json in (False, True):
            stream = io.StringIO()
            configure_logging("toy", "info", as_json, stream=stream)
            get_logger("outrider.toy").info("ready", port=1)
            logging.getLogger("uvicorn.error").info("Started server process")
            lines[as_json] = stream.getvalue()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z \[info\] ready \[outrider.toy\] port=1\n", lines[False]
    )
    found = json.loads(lines[True])
    assert (found["service"], found["event"], found["port"]) == ("toy", "ready", 1)
