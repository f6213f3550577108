"""LineProcess: lines, and processes that take too long, end, or write too much."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from outrider.shared.base.line_process import LineProcess, NoReplyError


def started(script: str, max_line_bytes: int = 1 << 20) -> LineProcess:
    return LineProcess([sys.executable, "-c", "import sys\n" + script], max_line_bytes)


def test_lines_are_read_one_by_one() -> None:
    process = started("print('a\\nb\\n' + 'c' * 200_000, flush=True)\nprint(sys.stdin.readline(), end='')")
    assert [process.read(60) for _ in range(3)] == [b"a", b"b", b"c" * 200_000]
    process.send(b"echo\n")
    assert process.read(60) == b"echo"
    process.kill()
    assert not process.running


@pytest.mark.parametrize(
    ("script", "limit_s", "late"),
    [("sys.stdin.read()", 0.0, True), ("", 60, False), ("print('x' * 99999); sys.stdin.read()", 60, False)],
)
def test_a_process_that_is_late_or_ends_or_writes_too_much_has_not_replied(
    script: str, limit_s: float, late: bool
) -> None:
    process = started(script, max_line_bytes=1000)
    with pytest.raises(NoReplyError) as caught:
        process.read(limit_s)
    assert caught.value.late is late
    process.kill()


def test_a_process_ends_with_its_object() -> None:
    process = started("sys.stdin.read()")
    child = process._process
    ended = weakref.ref(process)
    del process
    gc.collect()
    assert ended() is None
    assert child.returncode is not None
