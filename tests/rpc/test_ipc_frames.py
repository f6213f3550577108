"""Frames on a unix socket: they arrive whole, sizes and waits are bounded, and a peer's end is detected."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc import frames as frames_module
from outrider.shared.rpc.ipc.frames import HEADER, MAX_FRAME_BYTES, EndOfStream, FrameKind, FrameSocket

Pair = tuple[FrameSocket, FrameSocket]


def make_pair(buffer_bytes: int | None = None) -> Pair:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setblocking(False)
        if buffer_bytes:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return FrameSocket(ends[0]), FrameSocket(ends[1])


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = make_pair()
    yield both
    for end in both:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, FrameSocket]]:
    """A raw socket that writes arbitrary bytes, and a `FrameSocket` at its other end."""
    peer, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end.setblocking(False)
    frames = FrameSocket(end)
    yield peer, frames
    peer.close()
    frames.close()


@settings(max_examples=50, deadline=None)
@given(
    payloads=st.lists(st.binary(max_size=400_000), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 70_000), min_size=1),
)
def test_frames_arrive_whole_and_in_order_however_the_bytes_are_split(
    payloads: list[bytes], cuts: list[int]
) -> None:
    peer, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end.setblocking(False)
    frames = FrameSocket(end)
    stream = b"".join(HEADER.pack(len(payload), FrameKind.SESSION) + payload for payload in payloads)

    def write() -> None:
        position = turn = 0
        while position < len(stream):
            size = cuts[turn % len(cuts)] + 1000
            peer.sendall(stream[position : position + size])
            position, turn = position + size, turn + 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert [frames.receive(10.0) for _ in payloads] == [
            (FrameKind.SESSION, payload) for payload in payloads
        ]
        assert frames.receive() is None
    finally:
        writer.join()
        peer.close()
        frames.close()


@settings(max_examples=20, deadline=None)
@given(payloads=st.lists(st.binary(max_size=300_000), min_size=1, max_size=20))
def test_bytes_refused_by_a_full_socket_are_sent_later_in_order(payloads: list[bytes]) -> None:
    writer, reader = make_pair(buffer_bytes=4096)
    try:
        for payload in payloads:
            writer.send(FrameKind.SESSION, payload)  # there is no reader, so this must not wait
        received = []
        while len(received) < len(payloads):
            frame = reader.receive()
            if frame is None:
                writer.flush()
            else:
                received.append(frame[1])
        assert received == payloads
        assert not writer.has_unsent
    finally:
        writer.close()
        reader.close()


def test_a_receiver_flushes_what_it_could_not_send() -> None:
    asking, answering = make_pair(buffer_bytes=4096)
    question = os.urandom(1_000_000)
    asking.send(FrameKind.SESSION, question)
    assert asking.has_unsent

    def answer() -> None:
        received = answering.receive(10.0)
        assert received is not None
        answering.send(FrameKind.SESSION, received[1][:10])

    thread = threading.Thread(target=answer)
    thread.start()
    assert asking.receive(10.0) == (FrameKind.SESSION, question[:10])
    thread.join()
    asking.close()
    answering.close()


def test_waiting_is_bounded(pair: Pair) -> None:
    started = time.monotonic()
    assert pair[0].receive(0.05) is None
    assert 0.05 <= time.monotonic() - started < 2.0


def test_an_incomplete_frame_does_not_extend_the_wait(raw: tuple[socket.socket, FrameSocket]) -> None:
    peer, frames = raw
    peer.sendall(HEADER.pack(100, FrameKind.SESSION) + b"x" * 50)
    assert frames.receive(0.05) is None
    peer.sendall(b"x" * 50)
    assert frames.receive(5.0) == (FrameKind.SESSION, b"x" * 100)


@pytest.mark.parametrize(
    "header",
    [HEADER.pack(MAX_FRAME_BYTES + 1, FrameKind.SESSION), HEADER.pack(0, 0), HEADER.pack(3, 77) + b"abc"],
)
def test_garbage_is_a_protocol_error(raw: tuple[socket.socket, FrameSocket], header: bytes) -> None:
    peer, frames = raw
    peer.sendall(header)
    with pytest.raises(ProtocolError):
        frames.receive(5.0)


def test_a_message_that_is_too_large_is_not_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ProtocolError, match="limit of 10"):
        pair[0].send(FrameKind.SESSION, b"x" * 11)


def test_a_peer_that_never_reads_counts_as_gone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_UNSENT_BYTES", 1_000_000)

    def flood() -> None:
        for _ in range(100):
            pair[0].send(FrameKind.SESSION, b"x" * 100_000)

    with pytest.raises(EndOfStream, match="too many bytes unread"):
        flood()


def test_the_end_is_seen_after_the_last_frame(pair: Pair) -> None:
    pair[0].send(FrameKind.ERROR, b"why")
    pair[0].close()
    assert pair[1].receive(5.0) == (FrameKind.ERROR, b"why")
    with pytest.raises(EndOfStream):
        pair[1].receive(5.0)
    with pytest.raises(EndOfStream):
        pair[1].send(FrameKind.SESSION, b"x")


def test_closing_ends_the_wait_of_another_thread(pair: Pair) -> None:
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EndOfStream):
            pair[0].receive(60.0)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    pair[0].close()
    assert ended.wait(5.0)
    thread.join()
    assert pair[0].fileno() == -1
    with pytest.raises(EndOfStream):
        pair[0].receive(1.0)


def test_descriptors_travel_beside_a_frame(pair: Pair) -> None:
    read, write = os.pipe()
    pair[0].send(FrameKind.MAILBOX, b"two", [read, write])
    assert pair[1].receive(5.0) == (FrameKind.MAILBOX, b"two")
    with pytest.raises(ProtocolError, match="announced 3 descriptors but sent 2"):
        pair[1].take_files(3)
    there = pair[1].take_files(2)
    os.write(there[1], b"through")
    assert os.read(read, 7) == b"through"
    for descriptor in (read, write, *there):
        os.close(descriptor)


def test_unclaimed_descriptors_are_closed(pair: Pair) -> None:
    read, write = os.pipe()
    pair[0].send(FrameKind.MAILBOX, b"", [write])
    os.close(write)
    assert pair[1].receive(5.0) is not None
    pair[1].close()
    assert os.read(read, 1) == b"", "the last writing end is closed"
    os.close(read)
