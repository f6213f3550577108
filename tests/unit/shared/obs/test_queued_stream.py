"""Log output that stalls or fails: writing neither blocks nor raises, and the log says what is missing."""

from __future__ import annotations

import io
import os
import threading

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
