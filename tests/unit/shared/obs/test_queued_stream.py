"""Log output that stalls or fails: writing neither blocks nor raises, and the log says what is missing."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from pathlib import Path

import pytest
import structlog

from outrider.shared.obs.logging import configure_logging, get_logger
from outrider.shared.obs.queued_stream import QueuedStream

WAIT_S = 20
LINE = "x" * 1023 + "\n"


def test_text_arrives_in_order() -> None:
    behind = io.StringIO()
    stream = QueuedStream(behind)
    for number in range(100):
        print(number, file=stream)
    assert stream.drain(WAIT_S)
    assert behind.getvalue().split() == [str(number) for number in range(100)]


def test_a_reader_that_stalls_blocks_nobody_and_learns_what_is_missing() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as behind, os.fdopen(reading, "rb", buffering=0) as log:
        stream = QueuedStream(behind, max_chars=64 * 1024)
        # Far more than the pipe and the queue hold. Before, this blocked.
        for _ in range(2000):
            stream.write(LINE)
        received = bytearray()
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set() or not received.endswith(b"end\n"):
                received.extend(log.read(65536))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert stream.drain(WAIT_S)
        ended.set()
        stream.write("end\n")
        reader.join(WAIT_S)
        assert not reader.is_alive()
    lines = received.decode().splitlines()
    dropped = sum(int(line[1:].split()[0]) for line in lines if "log lines were dropped" in line)
    assert dropped > 1000
    assert lines.count(LINE.rstrip()) == 2000 - dropped


class FullDisk(io.StringIO):
    """A file on a disk that is full until `full` is cleared."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_costs_lines_only() -> None:
    behind = FullDisk()
    stream = QueuedStream(behind)
    stream.write("lost\n")
    assert stream.drain(WAIT_S)
    assert stream.dropped_lines == 1
    behind.full = False
    stream.write("kept\n")
    assert stream.drain(WAIT_S)
    assert behind.getvalue() == "(1 log lines were dropped because the log could not be written)\nkept\n"


def test_it_writes_to_a_full_device() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        stream = QueuedStream(full)
        stream.write("lost\n")
        assert stream.drain(WAIT_S)
        assert stream.dropped_lines == 1


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes of a disk, as a list of one number. A write takes as many bytes as are free."""
    free = [0]
    write = os.write

    def write_some(descriptor: int, data: memoryview) -> int:
        if not free[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: free[0]])
        free[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_some)
    return free


@pytest.mark.parametrize("room", range(7))
def test_a_line_cut_by_a_full_disk_is_completed(tmp_path: Path, small_disk: list[int], room: int) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as behind:
        stream = QueuedStream(behind)
        small_disk[0] = room
        stream.write("one\ntwo\nthree\n")
        assert stream.drain(WAIT_S)
        missing = stream.dropped_lines
        assert missing == (3 if room == 0 else 2 if room <= 4 else 1)
        stream.write("lost\n")
        assert stream.drain(WAIT_S)
        assert stream.dropped_lines == missing + 1
        small_disk[0] = 1000
        stream.write("four\n")
        assert stream.drain(WAIT_S)
    kept = ["one", "two"][: 3 - missing]
    notice = f"({missing + 1} log lines were dropped because the log could not be written)"
    assert (tmp_path / "log").read_text().splitlines() == [*kept, notice, "four"]


def test_a_cut_notice_is_completed_and_not_repeated(tmp_path: Path, small_disk: list[int]) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as behind:
        stream = QueuedStream(behind)
        for room, text in ((0, "lost\n"), (9, "lost too\n"), (1000, "kept\n")):
            small_disk[0] = room
            stream.write(text)
            assert stream.drain(WAIT_S)
    notice = "(1 log lines were dropped because the log could not be written)"
    assert (tmp_path / "log").read_text().splitlines() == [notice, notice, "kept"]


def test_a_notice_starts_a_line_if_the_end_of_the_last_one_was_dropped() -> None:
    behind = FullDisk()
    behind.full = False
    stream = QueuedStream(behind, max_chars=4)
    stream.write("half")
    assert stream.drain(WAIT_S)
    stream.write("too long\n")
    stream.write("end\n")
    assert stream.drain(WAIT_S)
    notice = "(1 log lines were dropped because the log could not be written)"
    assert behind.getvalue().splitlines() == ["half", notice, "end"]


def test_a_log_of_json_has_only_objects(tmp_path: Path, small_disk: list[int]) -> None:
    old = logging.getLogger().handlers[:], logging.getLogger().level
    with open(tmp_path / "log", "w", encoding="utf-8") as behind:
        stream = QueuedStream(behind)
        configure_logging("gateway", json=True, stream=stream)
        try:
            for room in (100, 0, 10_000):
                small_disk[0] = room
                for number in range(3):
                    get_logger("outrider.test").info("request", number=number)
                assert stream.drain(WAIT_S)
        finally:
            logging.getLogger().handlers[:], logging.getLogger().level = old
            structlog.reset_defaults()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (notice,) = (line for line in lines if "dropped" in line["event"])
    assert notice["lines"] + len(lines) - 1 == 9
    assert notice["service"] == "gateway"
    assert notice.keys() - {"lines"} == lines[-1].keys() - {"number"}
