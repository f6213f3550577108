"""`outrider chat` and `outrider top` in a pseudo-terminal: keys, commands, colours, Ctrl-C, full contexts."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.scripted_gateway import WAIT_S, ScriptedGateway, scripted_gateway

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The line editor turns bracketed paste on when it is ready for a line.
PROMPT = re.compile(r"\x1b\[\?2004h")
PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"


@pytest.fixture
def served() -> Iterator[tuple[ScriptedGateway, str]]:
    with scripted_gateway() as (script, address):
        yield script, address


def start(tmp_path: Path, address: str, *arguments: str) -> Any:
    """Run a command of the program in a terminal of 80 columns. The address is given by the environment."""
    environment = os.environ | {
        "TERM": "xterm-256color",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "OUTRIDER_URL": f"{address}/v1",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    environment.pop("NO_COLOR", None)
    return pexpect.spawn(
        sys.executable,
        ["-m", "outrider.services.cli", *arguments],
        env=environment,
        encoding="utf-8",
        timeout=WAIT_S,
        dimensions=(40, 80),
        # A test run in the background may ignore SIGINT, and child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def chat(served: tuple[ScriptedGateway, str], tmp_path: Path) -> Iterator[Any]:
    child = start(tmp_path, served[1], "chat")
    child.expect("Ctrl-D leaves")
    child.expect(PROMPT)
    yield child
    child.close(force=True)


def answered(child: Any) -> str:
    """Wait for the end of an answer and return what was printed."""
    child.expect("3 tokens")
    printed = str(child.before)
    child.expect(PROMPT)
    return printed


def test_an_answer_is_coloured_by_the_origin_of_its_tokens(chat: Any) -> None:
    chat.send("hello\r")
    printed = answered(chat)
    assert "The blue sky" in COLOUR.sub("", printed)
    # " blue" was drafted at depth 1, and " sky" is the token after the drafted tokens.
    assert re.search(r"\x1b\[38;5;66m ?blue\x1b", printed)
    assert re.search(r"\x1b\[38;5;172m ?sky\x1b", printed)


def test_a_paste_with_line_breaks_and_alt_enter_are_one_message(
    chat: Any, served: tuple[ScriptedGateway, str]
) -> None:
    chat.send(f"{PASTE_START}one\n\ntwo{PASTE_END}{ALT_ENTER}three\r")
    answered(chat)
    assert [body["messages"][-1]["content"] for body in served[0].bodies] == ["one\n\ntwo\nthree"]


def test_the_history_brings_back_a_line_and_is_private(
    chat: Any, served: tuple[ScriptedGateway, str], tmp_path: Path
) -> None:
    chat.send("first line\r")
    answered(chat)
    chat.send(f"{UP} again\r")
    answered(chat)
    assert served[0].bodies[-1]["messages"][-1]["content"] == "first line again"
    assert served[0].bodies[-1]["messages"][0]["content"] == "first line"
    history = tmp_path / "state" / "outrider" / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_commands_change_the_request_and_show_the_round(
    chat: Any, served: tuple[ScriptedGateway, str], tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    for line, shown in [
        ("/system Be brief.", "System prompt set"),
        ("/set depth 3", "depth"),
        ("/spec default", "Speculation: default of the server"),
        ("/spec on", "Speculation: on"),
        ("/help", "/tree"),
        ("/nonsense", "is not a command"),
        ("/set depth three", "whole number"),
    ]:
        chat.send(f"{line}\r")
        chat.expect_exact(shown)
        chat.expect(PROMPT)
    chat.send("//tmp is a folder\r")
    answered(chat)
    body = served[0].bodies[-1]
    assert [one["content"] for one in body["messages"]] == ["Be brief.", "/tmp is a folder"]
    assert body["speculation"] == {"mode": "on", "depth": 3, "trace": True}
    chat.send("/tree\r")
    chat.expect("chosen by the target")
    chat.expect("red")
    chat.expect(PROMPT)
    chat.send("/stats\r")
    chat.expect("2.00")
    chat.expect(PROMPT)
    chat.send(f"/save {saved}\r")
    chat.expect("Saved to")
    chat.expect(PROMPT)
    assert len(json.loads(saved.read_text())["messages"]) == 2
    chat.send("/reset\r")
    chat.expect("empty")
    chat.expect(PROMPT)
    chat.send(f"/load {saved}\r")
    chat.expect("Loaded 2 messages")
    chat.expect(PROMPT)
    chat.send("more\r")
    answered(chat)
    assert len(served[0].bodies[-1]["messages"]) == 4


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: Any, served: tuple[ScriptedGateway, str]) -> None:
    served[0].hold = True
    chat.send("hello\r")
    chat.expect("blue")
    chat.send(CTRL_C)
    chat.expect("stopped")
    assert served[0].disconnected.wait(WAIT_S)
    chat.expect(PROMPT)
    served[0].hold = False
    chat.send("again\r")
    answered(chat)
    # What had arrived stays part of the chat.
    assert [one["content"] for one in served[0].bodies[-1]["messages"]] == ["hello", "The blue sky", "again"]
    chat.send(CTRL_D)
    chat.expect(pexpect.EOF)
    chat.wait()
    assert chat.exitstatus == 0


def test_a_full_context_drops_the_oldest_turn_and_says_so(
    chat: Any, served: tuple[ScriptedGateway, str]
) -> None:
    for line in ("one", "two"):
        chat.send(f"{line}\r")
        answered(chat)
    served[0].max_messages = 3
    chat.send("three\r")
    chat.expect(r"dropped the oldest turn \(1 so far\)")
    answered(chat)
    assert [one["content"] for one in served[0].bodies[-1]["messages"]] == ["two", "The blue sky", "three"]
    chat.send("four\r")
    chat.expect(r"dropped the oldest turn \(2 so far\)")
    answered(chat)


def test_a_message_that_is_too_long_by_itself_leaves_the_chat_as_it_was(
    chat: Any, served: tuple[ScriptedGateway, str]
) -> None:
    for line in ("one", "two"):
        chat.send(f"{line}\r")
        answered(chat)
    served[0].max_characters = 20
    chat.send("x" * 30 + "\r")
    chat.expect("The prompt is too long")
    assert "dropped" not in chat.before
    chat.expect(PROMPT)
    chat.send("three\r")
    answered(chat)
    kept = ["one", "The blue sky", "two", "The blue sky", "three"]
    assert [one["content"] for one in served[0].bodies[-1]["messages"]] == kept


def status(generated: int) -> dict[str, Any]:
    return {
        "at": 100.0 + generated,
        "version": "9.9",
        "uptime_s": 5,
        "ready": True,
        "draining": False,
        "gateway": {"waiting": 0, "max_queued_requests": 512},
        "model": {"names": ["toy"], "device": "cpu", "dtype": "float32"},
        "target": {
            "running": 3,
            "waiting": 0,
            "max_running_requests": 16,
            "generated_tokens": generated * 50,
            "kv_pages": {"total": 100, "free": 90, "held": 10},
            "draft": {"state": "on", "algorithm": "EAGLE3"},
            "accept_length": 2.5,
        },
        "metrics": {"outrider_verify_seconds_sum": 1.0, "outrider_verify_seconds_count": 100.0},
        "errors": [
            {"at": 1.0, "route": "/x", "status": 429, "reason": "overloaded", "message": "Full.", "count": 4}
        ],
    }


def test_top_shows_load_and_rates_until_ctrl_c(served: tuple[ScriptedGateway, str], tmp_path: Path) -> None:
    script, address = served
    script.status = status(0)
    child = start(tmp_path, address, "top", "--interval", "0.1")
    child.expect("3 of 16")
    script.advance = status
    child.expect(r"tokens/s(?:\s|\x1b\[[0-9;]*m)+50 ")
    script.status = None
    child.expect("does not exist")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 1


def test_q_quits_top_and_gives_the_terminal_back(served: tuple[ScriptedGateway, str], tmp_path: Path) -> None:
    served[0].status = status(0) | {"uptime_s": 428.6}
    child = start(tmp_path, served[1], "top", "--interval", "60")
    child.expect("7 min")
    child.expect("q quits")
    assert not child.getecho()
    child.send("xq")
    child.expect_exact("\x1b[?1049l")  # leaves the alternate screen
    child.expect(pexpect.EOF)
    assert child.getecho()
    child.wait()
    assert child.exitstatus == 0


def test_top_prints_once_into_a_pipe_and_ends_at_ctrl_c(
    served: tuple[ScriptedGateway, str], tmp_path: Path
) -> None:
    script, address = served
    script.status = status(0)
    once = start(tmp_path, address, "top", "--once")
    for shown in ("version 9.9", "10 of 100", "EAGLE3", "2.50", "10.0 ms", "429", "overloaded"):
        assert once.expect_exact(shown) == 0
    once.close(force=True)
    live = start(tmp_path, address, "top", "--interval", "0.1")
    live.expect("3 of 16")
    live.kill(signal.SIGINT)
    live.expect(pexpect.EOF)
    live.wait()
    assert live.exitstatus == 0
