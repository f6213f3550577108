"""Two threads that read from one stream: take-overs, races between the threads, and deadlines of waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from support.connection.stream_rig import WAIT_S, Echo, EchoServers, Reader, Serve, exchange, receive

from outrider.shared.rpc import direct
from outrider.shared.rpc.direct import ClientStream
from outrider.shared.rpc.polling import PollWindow


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = EchoServers()
    yield servers.start
    servers.stop()


def test_another_thread_borrows_the_stream_and_gives_it_back(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: to.send(message)))
    reader = Reader(stream)
    taken = [exchange(stream, reader, number.to_bytes(2, "little")) for number in range(200)]
    assert sum(taken) >= 198  # the reader may already have received the first
    stream.send(b"later")  # the reader gets the stream back some time after the last borrowed read
    until = time.monotonic() + WAIT_S
    while reader.got.empty() and time.monotonic() < until:
        reader.thread.join(0.01)
    assert reader.got.get_nowait() == b"later"
    stream.cancel()
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_messages_are_sent_even_if_no_thread_reads(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "KEEP_S", 1e3)
    heard: SimpleQueue[bytes] = SimpleQueue()
    stream = serve(Echo(lambda to, message: heard.put(message)))
    reader = Reader(stream)
    stream.receive_within(0.0)
    stream.receive_within(0.0)  # the reader has stepped aside permanently
    sent = [bytes([number]) * 100_000 for number in range(50)]
    for message in sent:
        stream.send(message)
    assert [heard.get(timeout=WAIT_S) for _ in sent] == sent
    stream.cancel()
    stream.receive_within(WAIT_S)
    monkeypatch.setattr(direct, "KEEP_S", 0.0)
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_the_reader_continues_immediately_after_give_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "KEEP_S", 1e3)
    monkeypatch.setattr(direct, "LONGEST_WATCH_S", 2 * WAIT_S)
    stream = serve(Echo(lambda to, message: to.send(message)))
    reader = Reader(stream)
    exchange(stream, reader, b"first")
    exchange(stream, reader, b"second")
    assert stream.taken
    stream.give_back()
    started = time.monotonic()
    stream.send(b"third")
    assert reader.got.get(timeout=WAIT_S) == b"third"
    assert time.monotonic() - started < WAIT_S / 2
    stream.cancel()
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_no_message_is_missed_while_the_two_threads_take_turns(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that the reader receives during a take-over wakes the other thread without a timeout."""
    monkeypatch.setattr(direct, "KEEP_S", 0.0)
    monkeypatch.setattr(direct, "WATCH_S", 0.0001)
    monkeypatch.setattr(direct, "LONGEST_WATCH_S", 0.0001)
    stream = serve(Echo(lambda to, message: to.send(message)))
    reader = Reader(stream)
    taken = 0
    for number in range(400):
        started = time.monotonic()
        taken += exchange(stream, reader, number.to_bytes(2, "little"), number % 8 * 5e-5)
        assert time.monotonic() - started < WAIT_S / 2
        reader.thread.join(number % 5 * 1e-4)  # leaves the reader time to get the stream back
    assert 0 < taken < 400
    stream.cancel()
    reader.thread.join(WAIT_S)


class Crossing:
    """The stream's reading lock, which makes the reader meet the test's thread at a critical moment, once.

    Args:
        stream: The stream whose lock it replaces.
        before, behind: Conditions that the reader waits for: when it comes to the lock, and after releasing
            it.

    Attributes:
        came, left: Set when the reader has come to the lock, and when it has released it.
    """

    def __init__(
        self,
        stream: ClientStream,
        before: Callable[[], bool] | None = None,
        behind: Callable[[], bool] | None = None,
    ) -> None:
        self.came, self.left = threading.Event(), threading.Event()
        self._lock = stream._reading
        self._before, self._behind = before, behind
        self._tester = threading.current_thread()
        stream._reading = self  # type: ignore[assignment]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if threading.current_thread() is not self._tester:
            before, self._before = self._before, None
            self.came.set()
            wait_for(before or self.came.is_set)
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()
        if threading.current_thread() is not self._tester:
            behind, self._behind = self._behind, None
            self.left.set()
            wait_for(behind or self.left.is_set)

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def wait_for(condition: Callable[[], bool]) -> None:
    until, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition() and time.monotonic() < until:
        pause.wait(1e-3)


def test_a_wait_begun_just_before_the_reader_reads_ends_on_time(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: None))
    crossing = Crossing(stream, before=stream._reading.locked)
    reader = Reader(stream)
    assert crossing.came.wait(WAIT_S)
    watchdog = threading.Timer(WAIT_S, stream.cancel)
    watchdog.start()
    started = time.monotonic()
    assert stream.receive_within(0.0) is None  # the reader has handled the first message
    assert stream.receive_within(0.05) is None
    assert time.monotonic() - started < WAIT_S / 2
    watchdog.cancel()
    stream.cancel()
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_the_reader_returns_messages_kept_before_it_read(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: to.send(message)))
    crossing = Crossing(stream, before=lambda: bool(stream._early))
    reader = Reader(stream)
    assert crossing.came.wait(WAIT_S)
    stream.send(b"early")

    def taken_in() -> bool:
        stream.look()
        return bool(stream._early)

    wait_for(taken_in)
    assert reader.got.get(timeout=WAIT_S) == b"early"
    stream.cancel()
    reader.thread.join(WAIT_S)


def test_giving_the_stream_back_during_a_take_over_is_safe(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: to.send(message)))
    crossing = Crossing(stream, behind=lambda: not stream.taken)
    reader = Reader(stream)
    wait_for(stream._reading.locked)
    assert stream.receive_within(0.0) is None
    assert crossing.left.wait(WAIT_S)
    stream.give_back()
    stream.send(b"later")
    assert reader.got.get(timeout=WAIT_S) == b"later"
    stream.cancel()
    reader.thread.join(WAIT_S)


def test_a_wait_without_a_message_ends_on_time(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: None))
    reader = Reader(stream)
    assert stream.receive_within(0.5) is None  # returns immediately: the reader has handled the first message
    for seconds in (0.05, 0.02, 0.05):
        started = time.monotonic()
        assert stream.receive_within(seconds) is None
        assert seconds <= time.monotonic() - started < seconds + 1.0
    stream.cancel()
    started = time.monotonic()
    assert stream.receive_within(WAIT_S) is None
    assert time.monotonic() - started < WAIT_S / 2
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


class Sleeps(threading.Condition):
    """The condition that the watching thread sleeps on; records each timeout.

    Args:
        lock: The stream's lock.
        dozes: If true, does not sleep at all.
    """

    def __init__(self, lock: threading.Lock, dozes: bool = False) -> None:
        super().__init__(lock)
        self.noted: list[float] = []
        self._dozes = dozes

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.noted.append(timeout)
        return self._dozes or super().wait(timeout)


def test_a_wait_shorter_than_the_previous_one_ends_on_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watching thread sleeps for as long as the previous wait allows, and is woken up."""
    monkeypatch.setattr(direct, "KEEP_S", 1e3)
    monkeypatch.setattr(direct, "LONGEST_WATCH_S", 1e3)
    stream = serve(Echo(lambda to, message: to.send(message)))
    reader = Reader(stream)
    exchange(stream, reader, b"first")
    exchange(stream, reader, b"second")
    watchdog = threading.Timer(WAIT_S, stream.cancel)
    watchdog.start()
    for seconds in (0.02, 0.001, 0.01, 0.004):
        wait_for(lambda: stream._asleep_until > time.monotonic() + WAIT_S / 2)
        started = time.monotonic()
        assert stream.receive_within(seconds) is None
        assert seconds <= time.monotonic() - started < WAIT_S / 2
        exchange(stream, reader, b"a long wait again")
    watchdog.cancel()
    stream.cancel()
    stream.give_back()
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_waits_as_long_as_the_previous_one_do_not_wake_the_watch(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "KEEP_S", 1e3)
    monkeypatch.setattr(direct, "LONGEST_WATCH_S", 1e3)
    stream = serve(Echo(lambda to, message: to.send(message)))
    sleeps = stream._sooner = Sleeps(stream._lock)
    reader = Reader(stream)
    exchange(stream, reader, b"first")
    exchange(stream, reader, b"second")
    wait_for(lambda: stream._asleep_until > time.monotonic() + WAIT_S / 2)
    before = len(sleeps.noted)
    for _ in range(50):
        assert exchange(stream, reader, b"again")
        reader.thread.join(1e-3)
    assert len(sleeps.noted) == before
    stream.cancel()
    stream.give_back()
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


@pytest.mark.parametrize(("seconds", "most_s"), [(1e3, 0.05), (0.02, 0.02), (0.001, 0.005)])
def test_the_watch_sleeps_within_bounds_after_a_wait(serve: Serve, seconds: float, most_s: float) -> None:
    """A sender, or a message for the reader, may have to wait for the end of this sleep."""
    stream = serve(Echo(lambda to, message: None))
    assert stream.receive_within(0.0) is None
    stream._patience = seconds
    sleeps = stream._sooner = Sleeps(stream._lock, dozes=True)
    stream._watch()
    assert sleeps.noted == pytest.approx([most_s])


def test_look_sends_immediately_and_loses_no_message(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: to.send(message)))
    reader = Reader(stream)
    assert exchange(stream, reader, b"reader", 0.1) is False
    assert stream.poll() == [], "the reader has the stream"
    stream.receive_within(0.0)  # takes over
    early = 0
    for number in range(100):
        message = b"ahead %d" % number
        assert stream.poll() == []
        stream.send(message)
        reader.thread.join(number % 4 * 1e-3)  # by now the message is on its way, and perhaps already back
        came = stream.poll()
        until = time.monotonic() + WAIT_S
        while stream._sending and time.monotonic() < until:
            reader.thread.join(1e-3)
            came += stream.poll()
        assert not stream._sending
        assert came in ([], [message])
        early += len(came)
        if not came:
            receive(stream, reader, message)
    assert early >= 25 or PollWindow().enabled, (
        "unless another thread watches the sockets, messages arrive only during waits"
    )
    stream.cancel()
    reader.thread.join(WAIT_S)
    assert stream.poll() == [], "the stream has ended"
