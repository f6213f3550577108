"""Standby processes: they take over when a child exits, and end with the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.services.child_lines import Lines, is_running

from outrider.services.stack import supervisor as supervisors
from outrider.services.stack.standby import PREPARE, SERVE, VARIABLE, wait_until_needed
from outrider.services.stack.supervisor import ChildSpec, Supervisor

SERVICE = """
import os, signal, sys
from outrider.services.stack.standby import wait_until_needed
standby = os.environ.get("OUTRIDER_STANDBY", "")
wait_until_needed(lambda: print("loaded", flush=True))
print(os.getpid(), standby or "first", os.readlink("/proc/self/fd/0"), flush=True)
signal.pause()
"""


def spec(code: str = SERVICE) -> ChildSpec:
    return ChildSpec("draft", (sys.executable, "-c", code), drain_s=10.0, standby=True)


def children_of_this_process() -> set[int]:
    return {
        int(pid)
        for thread in Path("/proc/self/task").iterdir()
        for pid in (thread / "children").read_text().split()
    }


@pytest.mark.parametrize("prepared_after_s", [0.0, 600.0], ids=["prepared", "not prepared"])
def test_standby_processes_take_over_again_and_again(
    monkeypatch: pytest.MonkeyPatch, prepared_after_s: float
) -> None:
    monkeypatch.setattr(supervisors, "STABLE_AFTER_S", prepared_after_s)
    lines, others = Lines(), children_of_this_process()
    with Supervisor([spec()], lines) as supervisor:
        process_id, kind, _ = lines.next_of("draft").split()
        assert kind == "first"
        supervisor.settle()
        for _ in range(2):
            os.kill(int(process_id), signal.SIGKILL)
            assert "exited with signal SIGKILL" in lines.next_of("draft")
            assert lines.next_of("draft") == "a standby process takes over"
            assert lines.next_of("draft") == "loaded"
            process_id, kind, stdin = lines.next_of("draft").split()
            assert (kind, stdin) == ("1", "/dev/null")
            assert supervisor.child("draft").process_id == int(process_id)
        assert supervisor.child("draft").starts == 3
        running = children_of_this_process() - others
        assert len(running) >= 1
    assert not any(is_running(pid) for pid in running), "no standby process may stay behind"


def test_a_standby_process_that_has_died_is_replaced() -> None:
    lines = Lines()
    dies = SERVICE.replace("wait_until_needed(l", "if standby:\n    sys.exit(3)\nwait_until_needed(l")
    with Supervisor([spec(dies)], lines) as supervisor:
        first = int(lines.next_of("draft").split()[0])
        standby = supervisor.child("draft")._standby
        assert standby is not None
        standby._process.wait(20)
        supervisor.settle()
        os.kill(first, signal.SIGKILL)
        assert "exited with signal SIGKILL" in lines.next_of("draft")
        assert lines.next_of("draft") == "the standby process had ended with code 3"
        assert lines.next_of("draft").split()[1] == "first", "a fresh process must be started"


def test_a_failed_start_leaves_no_standby_process() -> None:
    lines = Lines()
    fails = SERVICE.replace("wait_until_needed(l", "if not standby:\n    sys.exit('no')\nwait_until_needed(l")
    with Supervisor([spec(fails)], lines) as supervisor:
        assert lines.next_of("draft") == "no"
        child = supervisor.child("draft")
        child._thread.join(20)
        assert child.failed()
        assert child._standby is None


def test_a_standby_process_exits_when_the_supervisor_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, VARIABLE: "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(PREPARE + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "loaded\n"
    process.stdin.close()
    assert process.wait(20) == 0
    assert process.stdout.read() == "", "it must not serve"
    process.stdout.close()


def test_other_processes_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    wait_until_needed(lambda: pytest.fail("nothing is loaded early"))
    assert SERVE != PREPARE
