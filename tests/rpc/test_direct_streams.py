"""Streams below grpcio's own: order, ends, take-overs and what waits when a peer does not read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc
import pytest

from outrider.shared.rpc import direct
from outrider.shared.rpc.client import connect
from outrider.shared.rpc.direct import ClientStream, ServerStream, StreamEndedError
from outrider.shared.rpc.polling import EXPERIMENTS, SLEEP_MS, WITHOUT_EVENT_ENGINE, Vigil, watch_sockets

METHOD = "/test.Echo/Stream"
WAIT_S = 10.0


class Echo(grpc.GenericRpcHandler):
    """Answers the first message by itself, and hands what follows to `on_message`, with what sends."""

    def __init__(self, on_message: Callable[[ServerStream, bytes], None], max_unsent: int = 100) -> None:
        self.ended: SimpleQueue[Exception | None] = SimpleQueue()
        self._on_message = on_message
        self._max_unsent = max_unsent

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(self._serve)

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        endings: SimpleQueue[Exception | None] = SimpleQueue()
        yield next(requests)
        stream = ServerStream(context, lambda message: self._on_message(stream, message), endings.put, self._max_unsent, Vigil())
        stream.start()
        error = endings.get()
        stream.flush()
        self.ended.put(error)
        if error is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


@pytest.fixture
def serve() -> Iterator[Callable[[Echo], ClientStream]]:
    servers: list[grpc.Server] = []
    channels: list[grpc.Channel] = []
    streams: list[ClientStream] = []

    def start(echo: Echo) -> ClientStream:
        server = grpc.server(ThreadPoolExecutor(4), handlers=[echo])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = connect(f"127.0.0.1:{port}")
        stream = ClientStream(channel, METHOD, Vigil())
        servers.append(server)
        channels.append(channel)
        streams.append(stream)
        stream.send(b"first")
        assert stream.receive() == b"first"
        return stream

    yield start
    for stream in streams:
        stream.cancel()
        stream.drain()
    for channel in channels:
        channel.close()
    for server in servers:
        server.stop(0).wait()


Serve = Callable[[Echo], ClientStream]


def test_messages_arrive_in_order_however_many_are_sent_at_once(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: to.send(message), max_unsent=300))
    sent = [bytes([number % 256]) * (number * 37 % 5000) for number in range(300)]
    for message in sent:
        stream.send(message)
    assert [stream.receive() for _ in sent] == sent


def test_an_error_of_the_server_ends_the_stream_with_its_status_after_what_was_sent(serve: Serve) -> None:
    def fail(to: ServerStream, message: bytes) -> None:
        if message == b"bad":
            raise ValueError("no such message")
        to.send(message)

    stream = serve(Echo(fail))
    stream.send(b"good")
    stream.send(b"bad")
    stream.send(b"unheard")
    assert stream.receive() == b"good"
    with pytest.raises(StreamEndedError) as caught:
        stream.receive()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "no such message"
    assert stream.ended
    stream.send(b"into the void")
    assert stream.receive_within(0.01) is None


def test_a_cancel_ends_both_sides(serve: Serve) -> None:
    echo = Echo(lambda to, message: to.send(message))
    stream = serve(echo)
    threading.Timer(0.05, stream.cancel).start()
    with pytest.raises(StreamEndedError) as caught:
        stream.receive()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert echo.ended.get(timeout=WAIT_S) is None


def test_a_server_that_is_gone_ends_the_stream() -> None:
    """Its process is killed: nothing tells of the end but the socket."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        channel = connect(f"127.0.0.1:{server.stdout.readline().strip()}")
        stream = ClientStream(channel, METHOD, Vigil())
        stream.send(b"first")
        assert stream.receive() == b"first"
        server.kill()
        with pytest.raises(StreamEndedError) as caught:
            stream.receive()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    channel.close()


def test_a_peer_that_does_not_read_is_hung_up_on(serve: Serve) -> None:
    flooded = threading.Event()

    def flood(to: ServerStream, message: bytes) -> None:
        for _ in range(200):
            to.send(bytes(1 << 20))
        flooded.set()

    echo = Echo(flood, max_unsent=50)
    stream = serve(echo)
    stream.send(b"go")
    # Nobody is in `receive`, so the core takes no more than its window.
    assert flooded.wait(WAIT_S)
    assert echo.ended.get(timeout=WAIT_S) is None


class Reader:
    """The thread that stays in `receive`."""

    def __init__(self, stream: ClientStream) -> None:
        self.got: SimpleQueue[bytes] = SimpleQueue()
        self._stream = stream
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            while (message := self._stream.receive()) is not None:
                self.got.put(message)
        except StreamEndedError:
            pass


def exchange(stream: ClientStream, reader: Reader, message: bytes, pause_s: float = 0.0) -> bool:
    """Send a message that comes back; returns whether this thread received it, not the reader."""
    stream.send(message)
    if pause_s:
        reader.thread.join(pause_s)
    return receive(stream, reader, message)


def receive(stream: ClientStream, reader: Reader, message: bytes) -> bool:
    """Wait for a message; returns whether this thread received it, not the reader."""
    while True:
        if not reader.got.empty():
            assert reader.got.get() == message
            return False
        received = stream.receive_within(WAIT_S)
        if received is not None:
            assert received == message
            return True


def test_another_thread_takes_over_and_gives_back(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: to.send(message)))
    reader = Reader(stream)
    taken = [exchange(stream, reader, number.to_bytes(2, "little")) for number in range(200)]
    assert sum(taken) >= 198  # the reader may have the first in hand
    stream.send(b"later")  # some time after the last turn the reader is back
    until = time.monotonic() + WAIT_S
    while reader.got.empty() and time.monotonic() < until:
        reader.thread.join(0.01)
    assert reader.got.get_nowait() == b"later"
    stream.cancel()
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_messages_go_out_though_nobody_reads(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "KEEP_S", 1e3)
    heard: SimpleQueue[bytes] = SimpleQueue()
    stream = serve(Echo(lambda to, message: heard.put(message)))
    reader = Reader(stream)
    stream.receive_within(0.0)
    stream.receive_within(0.0)  # the reader has made way, for good
    sent = [bytes([number]) * 100_000 for number in range(50)]
    for message in sent:
        stream.send(message)
    assert [heard.get(timeout=WAIT_S) for _ in sent] == sent
    stream.cancel()
    stream.receive_within(WAIT_S)
    monkeypatch.setattr(direct, "KEEP_S", 0.0)
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_the_reader_goes_on_at_once_when_it_is_let(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_message_is_waited_for_in_vain_while_the_two_take_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reader takes in the moment of a take-over wakes the other thread: only the clock would, else."""
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
        reader.thread.join(number % 5 * 1e-4)  # a moment for the reader to take the stream back
    assert 0 < taken < 400
    stream.cancel()
    reader.thread.join(WAIT_S)


class Crossing:
    """The lock of who reads, at which the reader meets the test's thread in an unlucky moment, once.

    Args:
        stream: Whose lock it becomes.
        before, behind: What must be so until the reader goes on, when it comes to the lock and when it has released it.

    Attributes:
        came, left: It has come to the lock, and has released it.
    """

    def __init__(self, stream: ClientStream, before: Callable[[], bool] | None = None, behind: Callable[[], bool] | None = None) -> None:
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


def test_a_wait_ends_in_time_that_began_when_the_reader_was_about_to_read(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: None))
    crossing = Crossing(stream, before=stream._reading.locked)
    reader = Reader(stream)
    assert crossing.came.wait(WAIT_S)
    watchdog = threading.Timer(WAIT_S, stream.cancel)
    watchdog.start()
    started = time.monotonic()
    assert stream.receive_within(0.0) is None  # the reader has dealt with the first message
    assert stream.receive_within(0.05) is None
    assert time.monotonic() - started < WAIT_S / 2
    watchdog.cancel()
    stream.cancel()
    reader.thread.join(WAIT_S)
    assert not reader.thread.is_alive()


def test_the_reader_takes_what_was_taken_in_before_it_read(serve: Serve) -> None:
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


def test_a_stream_that_is_given_back_in_the_moment_of_a_take_over_goes_on(serve: Serve) -> None:
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


def test_a_wait_ends_in_time_though_nothing_comes(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: None))
    reader = Reader(stream)
    assert stream.receive_within(0.5) is None  # at once: the reader has dealt with the first message
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


def test_a_thread_that_looks_sends_at_once_and_loses_no_message(serve: Serve) -> None:
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
        reader.thread.join(number % 4 * 1e-3)  # by now it is on its way, and perhaps back already
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
    assert early >= 25 or Vigil().enabled, "where nobody else watches the sockets, nothing comes while nobody waits"
    stream.cancel()
    reader.thread.join(WAIT_S)
    assert stream.poll() == [], "it has ended"


SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
server = grpc.server(ThreadPoolExecutor(2), handlers=[Echo()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""

AWAKE = """
import subprocess, sys, time
from outrider.shared.rpc import polling
polling.MANY_CORES = 0
polling.watch_sockets()
from outrider.shared.rpc.client import connect
from outrider.shared.rpc.direct import ClientStream
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
vigil = polling.Vigil()
channel = connect("127.0.0.1:" + server.stdout.readline().strip())
stream = ClientStream(channel, "/test.Echo/Stream", vigil)

def spent_in_a_wait():
    import threading
    threading.Timer(0.3, lambda: stream.send(b"x")).start()
    before = time.process_time()
    assert stream.receive() == b"x"
    return time.process_time() - before

asleep = spent_in_a_wait()
vigil.expect(10.0)
awake = spent_in_a_wait()
vigil.rest()
again = spent_in_a_wait()
print(asleep, awake, again)
stream.cancel(); stream.drain(); channel.close(); server.kill()
"""


def test_waits_poll_while_a_message_is_due_and_sleep_otherwise() -> None:
    environment = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    done = subprocess.run([sys.executable, "-c", AWAKE, SERVER], env=environment, capture_output=True, text=True, timeout=60, check=True)
    asleep, awake, again = map(float, done.stdout.split())
    assert asleep < 0.1
    assert again < 0.1
    assert awake > asleep + 0.05


def test_few_cores_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXPERIMENTS, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    watch_sockets()
    assert EXPERIMENTS not in os.environ
    monkeypatch.setenv(EXPERIMENTS, WITHOUT_EVENT_ENGINE)
    assert not Vigil().enabled


def test_the_library_exports_what_waits_are_told_by() -> None:
    """Otherwise nothing would poll, and nobody would notice but by a clock."""
    vigil = Vigil(enabled=True)
    assert vigil._period is not None
    assert vigil._period.value == SLEEP_MS
