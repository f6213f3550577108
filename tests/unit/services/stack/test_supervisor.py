"""The supervisor: restarts, failed starts, draining and killing, with small Python programs as children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from support.services.child_lines import Lines, is_running

from outrider.services.stack.supervisor import Child, ChildSpec, Supervisor, next_backoff

# Prints its process id, then waits for a signal.
WAITING = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
SAYS_BYE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(0)))
print("up", flush=True)
while True:
    signal.pause()
"""


def python(name: str, code: str, drain_s: float = 10.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), drain_s)


def test_backoff_doubles_from_a_fifth_of_a_second_to_five_and_restarts_after_a_stable_life() -> None:
    waits = [0.0]
    for _ in range(7):
        waits.append(next_backoff(waits[-1], lived_s=0.1))
    assert waits[1:] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert next_backoff(5.0, lived_s=60.0) == 0.2


def test_a_killed_child_is_restarted_once_settled() -> None:
    lines = Lines()
    with Supervisor([python("draft", WAITING)], lines) as supervisor:
        first = int(lines.next_of("draft"))
        supervisor.settle()
        os.kill(first, signal.SIGKILL)
        assert lines.next_of("draft") == "exited with signal SIGKILL; restarting in 0.2 s"
        second = int(lines.next_of("draft"))
        assert second != first
        assert supervisor.child("draft").starts == 2
        assert supervisor.child("draft").process_id == second
    assert not is_running(second)


def test_a_death_while_starting_is_reported_and_not_repeated() -> None:
    lines = Lines()
    with Supervisor(
        [python("target", "import sys; print('no such model'); sys.exit(2)")], lines
    ) as supervisor:
        assert lines.next_of("target") == "no such model"
        failed = wait_until(supervisor.failed)
        assert failed.spec.name == "target"
        assert failed.exit_code == 2
        assert list(failed.last_lines) == ["no such model"]
        assert failed.starts == 1


def test_children_start_without_a_fork_of_this_process() -> None:
    """A fork runs gRPC's handlers in the child, which may abort it before it becomes the service."""
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    lines = Lines()
    with Supervisor([python("draft", WAITING)], lines):
        assert int(lines.next_of("draft")) > 0
    assert not forks


def test_a_child_dies_with_its_supervisor() -> None:
    supervises = f"""
import sys, threading
from outrider.services.stack.supervisor import ChildSpec, Supervisor
spec = ChildSpec("draft", (sys.executable, "-c", {WAITING!r}), 10.0)
with Supervisor([spec], lambda name, line: print(line, flush=True)):
    threading.Event().wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", supervises], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert is_running(child)
        supervisor.kill()
    assert wait_until(lambda: None if is_running(child) else True)


def test_a_missing_program_counts_as_a_failed_start() -> None:
    lines = Lines()
    with Supervisor([ChildSpec("draft", ("/nonexistent/outrider",))], lines) as supervisor:
        assert "cannot start /nonexistent/outrider" in lines.next_of("draft")
        assert wait_until(supervisor.failed).exit_code == 127


def test_children_drain_in_the_given_order() -> None:
    code = SAYS_BYE
    order: list[tuple[str, str]] = []
    lines = Lines()

    def record(name: str, line: str) -> None:
        order.append((name, line))
        lines(name, line)

    with Supervisor(
        [python("gateway", code), python("target", code), python("draft", code)], record
    ) as supervisor:
        for name in ("gateway", "target", "draft"):
            assert lines.next_of(name) == "up"
        supervisor.settle()
    assert [name for name, line in order if line == "bye"] == ["gateway", "target", "draft"]
    assert [child.exit_code for child in supervisor.children] == [0, 0, 0]


def test_a_child_that_ignores_the_signal_is_killed_after_its_drain_time() -> None:
    lines = Lines()
    with Supervisor([python("target", STUBBORN, drain_s=0.3)], lines) as supervisor:
        process_id = int(lines.next_of("target"))
        supervisor.settle()
    assert lines.next_of("target") == "did not stop within 0.3 s; killed"
    assert not is_running(process_id)
    assert supervisor.child("target").exit_code == -signal.SIGKILL


def test_a_stopped_child_can_be_drained() -> None:
    lines = Lines()
    with Supervisor([python("draft", WAITING)], lines) as supervisor:
        process_id = int(lines.next_of("draft"))
        supervisor.settle()
        os.kill(process_id, signal.SIGSTOP)
    assert not is_running(process_id)
    assert supervisor.child("draft").exit_code == -signal.SIGTERM


def test_children_die_with_a_killed_supervisor() -> None:
    program = f"""
import signal, sys
from outrider.services.stack.supervisor import ChildSpec, Supervisor
spec = ChildSpec("draft", (sys.executable, "-c", {WAITING!r}))
with Supervisor([spec], lambda name, line: print(line, flush=True)):
    signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    # The inherited pipe reaches its end when the last process that holds it has exited.
    assert parent.stdout.read() == ""
    parent.stdout.close()
    wait_until(lambda: None if is_running(child) else True)


T = TypeVar("T")


def wait_until(probe: Callable[[], T | None]) -> T:
    """Poll until `probe` returns a value. The test's own timeout limits the wait."""
    while True:
        if (answer := probe()) is not None:
            return answer
        threading.Event().wait(0.01)


def test_children_are_found_by_name() -> None:
    supervisor = Supervisor([python("gateway", WAITING), python("draft", WAITING)], Lines())
    assert isinstance(supervisor.child("draft"), Child)
    assert supervisor.child("draft").process_id is None


def test_a_log_that_cannot_be_written_leaves_the_child_alone() -> None:
    """The end of the thread that reads the output would also kill the child."""
    lines = Lines()

    def echo(name: str, line: str) -> None:
        if line == "lost":
            raise OSError(28, "No space left on device")
        lines(name, line)

    with Supervisor([python("child", "print('lost', flush=True)\n" + WAITING)], echo) as supervisor:
        assert is_running(int(lines.next_of("child")))
        assert supervisor.child("child").starts == 1


def test_control_characters_of_children_are_escaped() -> None:
    lines = Lines()
    with Supervisor([python("child", "print('\\x1b[2J')")], lines):
        assert lines.next_of("child") == r"\x1b[2J"


def test_a_child_does_not_get_hidden_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_GATEWAY_API_KEY", "secret")
    code = "import os; print('OUTRIDER_GATEWAY_API_KEY' in os.environ)"
    lines = Lines()
    hidden = ChildSpec("hidden", (sys.executable, "-c", code), 10.0, ("OUTRIDER_GATEWAY_API_KEY",))
    with Supervisor([hidden, python("open", code)], lines):
        assert lines.next_of("hidden") == "False"
        assert lines.next_of("open") == "True"
