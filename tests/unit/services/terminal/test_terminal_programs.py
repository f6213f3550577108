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
from support.services.scripted_gateway import WAIT_S, ScriptedGateway, scripted_gateway

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The line editor turns bracketed paste on when it is ready for a line.
PROMPT = re.compile(r"\x1b\[\?2004h")
PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"
DOWN, PAGE_UP, PAGE_DOWN, HOME, END = "\x1b[B", "\x1b[5~", "\x1b[6~", "\x1b[H", "\x1b[4~"


@pytest.fixture
def served() -> Iterator[tuple[ScriptedGateway, str]]:
    with scripted_gateway() as (script, address):
        yield script, address


def start(tmp_path: Path, address: str, *arguments: str, rows: int = 40, **variables: str) -> Any:
    """Run a command of the program in a terminal of 80 columns. The address is given by the environment."""
    environment = os.environ | {
        "TERM": "xterm-256color",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "OUTRIDER_URL": f"{address}/v1",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    environment.pop("NO_COLOR", None)
    environment.update(variables)
    return pexpect.spawn(
        sys.executable,
        ["-m", "outrider.services.cli", *arguments],
        env=environment,
        encoding="utf-8",
        timeout=WAIT_S,
        dimensions=(rows, 80),
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


def test_lines_typed_while_the_chat_starts_or_answers_are_messages_of_their_own(
    served: tuple[ScriptedGateway, str], tmp_path: Path
) -> None:
    script = served[0]
    child = start(tmp_path, served[1], "chat")
    child.send("one\r/stats\rtw")
    child.expect("accept length")  # of the answer
    child.expect("why a")
    child.expect(PROMPT)
    child.send("o\r")
    answered(child)
    script.pauses = True
    child.send("three\r")
    child.expect("blue")
    child.send("four\r")
    child.expect("four")
    script.released.set()
    child.expect("3 tokens")
    answered(child)
    asked = [body["messages"][-1]["content"] for body in script.bodies]
    assert asked == ["one", "two", "three", "four"]
    child.send(UP)
    child.expect("four")
    child.close(force=True)


def test_generate_says_how_to_end_a_typed_prompt(served: tuple[ScriptedGateway, str], tmp_path: Path) -> None:
    child = start(tmp_path, served[1], "generate")
    child.expect("End it with Ctrl-D")
    child.send(f"hello\r{CTRL_D}")
    child.expect("The blue sky")
    child.expect(pexpect.EOF)
    assert served[0].bodies[0]["messages"][0]["content"] == "hello\n"


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


def test_the_tree_is_that_of_the_last_answer_and_needs_no_colours(
    served: tuple[ScriptedGateway, str], tmp_path: Path
) -> None:
    child = start(tmp_path, served[1], "chat", NO_COLOR="1")
    child.expect(PROMPT)
    child.send("hello\r")
    answered(child)
    child.send("/tree\r")
    child.expect("accepted")
    child.expect("chosen by the target")
    child.expect("rejected")
    child.expect(PROMPT)
    served[0].has_rounds = False
    child.send("again\r")
    answered(child)
    child.send("/tree\r")
    child.expect("There is no round to show")
    child.close(force=True)


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: Any, served: tuple[ScriptedGateway, str]) -> None:
    served[0].hold = True
    chat.send("hello\r")
    chat.expect("blue")
    chat.send(CTRL_C)
    chat.expect("stopped")
    # What had arrived counts: the token of the prefill, and a round with two tokens.
    assert "3 tokens in 1 round with drafts; accept length 2.00" in chat.before
    assert "^C" not in chat.before
    assert served[0].disconnected.wait(WAIT_S)
    chat.expect(PROMPT)
    chat.send("/stats\r")
    chat.expect(r"\n +1 +3 +(–|\d+) +\d+ ms +2\.00 +1 ")
    chat.expect(PROMPT)
    served[0].hold = False
    chat.send("again\r")
    answered(chat)
    assert [one["content"] for one in served[0].bodies[-1]["messages"]] == ["hello", "The blue sky", "again"]
    chat.send(CTRL_D)
    chat.expect(pexpect.EOF)
    chat.wait()
    assert chat.exitstatus == 0


def test_an_answer_without_room_is_limited_and_no_turn_is_dropped(
    chat: Any, served: tuple[ScriptedGateway, str]
) -> None:
    script = served[0]
    script.context = 1000
    for line in ("one", "two"):
        chat.send(f"{line}\r")
        answered(chat)
    chat.send("/set max_tokens 100000\r")
    chat.expect("100000")
    chat.expect(PROMPT)
    chat.send("three\r")
    chat.expect(r"room for 965 new tokens, fewer than max_tokens=100000")
    answered(chat)
    assert len(script.bodies[-1]["messages"]) == 5
    assert [body["max_tokens"] for body in script.bodies] == [512, 512, 965]
    assert script.refused == 0


def test_turns_are_dropped_before_the_gateway_would_refuse(
    chat: Any, served: tuple[ScriptedGateway, str]
) -> None:
    script = served[0]
    script.context = 800
    for _ in range(2):
        chat.send("x" * 335 + "\r")
        answered(chat)
    # With 335 + 12 + 335 + 12 + 13 tokens, less than an eighth would be left for the answer.
    chat.send("three of them\r")
    chat.expect(r"dropped the oldest turn \(1 so far\)")
    chat.expect(r"room for 440 new")
    answered(chat)
    assert len(script.bodies[-1]["messages"]) == 3
    chat.send("y" * 800 + "\r")
    chat.expect("The prompt is too long: it has 800 tokens")
    chat.expect(PROMPT)
    assert (script.refused, len(script.bodies)) == (0, 3)


def test_a_gateway_that_cannot_count_is_asked_again_without_a_limit(
    chat: Any, served: tuple[ScriptedGateway, str]
) -> None:
    script = served[0]
    script.context, script.counts = 400, False
    chat.send("one\r")
    chat.expect("almost full")
    answered(chat)
    assert "max_tokens" not in script.bodies[0]


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


@pytest.mark.parametrize("rows", [24, 40])
def test_top_scrolls_to_all_its_panels_and_always_says_how_to_leave(
    served: tuple[ScriptedGateway, str], tmp_path: Path, rows: int
) -> None:
    error = {"at": 1.0, "route": "/x", "status": 429, "reason": "overloaded", "message": "Full.", "count": 4}
    errors = [error | {"message": f"message {number}."} for number in range(30)]
    served[0].status = status(0) | {"errors": errors}
    child = start(tmp_path, served[1], "top", "--interval", "60", rows=rows)
    child.expect("Services")
    child.expect(rf"q quits .* scroll   lines 1–{rows - 1} of \d+")
    assert "message 29" not in child.before
    child.send(PAGE_DOWN)
    child.expect(rf"q quits .* lines {rows - 1}–{2 * rows - 3} of \d+")
    child.send(DOWN)
    child.expect(rf"lines {rows}–")
    child.send(END)
    child.expect("message 29")
    child.expect("q quits")
    child.send(f"{UP}{PAGE_UP}{HOME}")
    child.expect("Services")
    child.expect("lines 1–")
    child.send("q")
    child.expect(pexpect.EOF)


def test_top_prints_once_into_a_pipe_and_ends_at_ctrl_c(
    served: tuple[ScriptedGateway, str], tmp_path: Path
) -> None:
    script, address = served
    script.status = status(0)
    once = start(tmp_path, address, "top", "--once")
    once.expect(pexpect.EOF)
    for shown in ("version 9.9", "10 of 100", "EAGLE3", "2.50", "10.0 ms", "429", "overloaded"):
        assert shown in once.before
    once.close(force=True)
    live = start(tmp_path, address, "top", "--interval", "0.1")
    live.expect("3 of 16")
    live.kill(signal.SIGINT)
    live.expect(pexpect.EOF)
    live.wait()
    assert live.exitstatus == 0
