"""Direct gRPC streams: message order, ends of streams, slow readers, and whether waits poll or sleep."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from support.connection.stream_rig import METHOD, SERVER, WAIT_S, Echo, EchoServers, Serve

from outrider.shared.rpc import polling
from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.direct import ClientStream, StreamEndedError
from outrider.shared.rpc.direct_server import ServerStream
from outrider.shared.rpc.polling import (
    EXPERIMENTS,
    SLEEP_MS,
    WITHOUT_EVENT_ENGINE,
    PollWindow,
    give_way,
    watch_sockets,
)


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = EchoServers()
    yield servers.start
    servers.stop()


def test_many_messages_sent_together_arrive_in_order(serve: Serve) -> None:
    stream = serve(Echo(lambda to, message: to.send(message), max_unsent=300))
    sent = [bytes([number % 256]) * (number * 37 % 5000) for number in range(300)]
    for message in sent:
        stream.send(message)
    assert [stream.receive() for _ in sent] == sent


def test_a_server_error_ends_the_stream_with_its_status_after_earlier_messages(serve: Serve) -> None:
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


def test_the_callback_of_a_message_runs_once_it_is_on_its_way(serve: Serve) -> None:
    """The callback runs on the thread that receives messages, whether or not the message had to queue."""
    threads: list[threading.Thread] = []

    def answer(to: ServerStream, message: bytes) -> None:
        def then() -> None:
            threads.append(threading.current_thread())
            to.send(b"then " + message)

        for part in range(int(message)):
            to.send(b"before %d" % part)
        to.send(b"now " + message, then)
        to.send(b"behind")
        threads.append(threading.current_thread())

    stream = serve(Echo(answer))
    for number in (0, 3):
        threads.clear()
        stream.send(b"%d" % number)
        heard = [stream.receive() for _ in range(number + 3)]
        assert heard[:-2] == [b"before %d" % part for part in range(number)] + [b"now %d" % number]
        assert sorted(filter(None, heard[-2:])) == [b"behind", b"then %d" % number]
        assert len(threads) == 2
        assert threads[0] is threads[1]


def test_a_failing_callback_of_a_message_ends_only_its_stream(serve: Serve) -> None:
    def fail() -> None:
        raise ValueError("no such round")

    echo = Echo(lambda to, message: to.send(message, fail if message == b"bad" else None))
    one, other = serve(echo), serve(Echo(lambda to, message: to.send(message)))
    one.send(b"bad")
    assert one.receive() == b"bad"
    with pytest.raises(StreamEndedError, match="no such round"):
        one.receive()
    other.send(b"good")
    assert other.receive() == b"good"


def test_cancelling_ends_both_sides(serve: Serve) -> None:
    echo = Echo(lambda to, message: to.send(message))
    stream = serve(echo)
    threading.Timer(0.05, stream.cancel).start()
    with pytest.raises(StreamEndedError) as caught:
        stream.receive()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert echo.ended.get(timeout=WAIT_S) is None


def test_a_killed_server_ends_the_stream() -> None:
    """The server's process is killed, so only the socket shows the end."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        channel = open_channel(f"127.0.0.1:{server.stdout.readline().strip()}")
        stream = ClientStream(channel, METHOD, PollWindow())
        stream.send(b"first")
        assert stream.receive() == b"first"
        server.kill()
        with pytest.raises(StreamEndedError) as caught:
            stream.receive()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    channel.close()


def test_a_stream_ends_if_the_peer_does_not_read(serve: Serve) -> None:
    flooded = threading.Event()

    def flood(to: ServerStream, message: bytes) -> None:
        for _ in range(200):
            to.send(bytes(1 << 20))
        flooded.set()

    echo = Echo(flood, max_unsent=50)
    stream = serve(echo)
    stream.send(b"go")
    # No thread is in `receive`, so the core accepts no more than its flow-control window.
    assert flooded.wait(WAIT_S)
    assert echo.ended.get(timeout=WAIT_S) is None


AWAKE = """
import subprocess, sys, time
from outrider.shared.rpc import polling
polling.MANY_CORES = 0
polling.watch_sockets()
from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.direct import ClientStream
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
poll_window = polling.PollWindow()
channel = open_channel("127.0.0.1:" + server.stdout.readline().strip())
stream = ClientStream(channel, "/test.Echo/Stream", poll_window)

def spent_in_a_wait():
    import threading
    threading.Timer(0.3, lambda: stream.send(b"x")).start()
    before = time.process_time()
    assert stream.receive() == b"x"
    return time.process_time() - before

asleep = spent_in_a_wait()
poll_window.expect(10.0)
awake = spent_in_a_wait()
poll_window.rest()
again = spent_in_a_wait()
print(asleep, awake, again)
stream.cancel(); stream.drain(); channel.close(); server.kill()
"""


def test_waits_poll_while_a_message_is_due_and_sleep_otherwise() -> None:
    environment = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    done = subprocess.run(
        [sys.executable, "-c", AWAKE, SERVER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    asleep, awake, again = map(float, done.stdout.split())
    assert asleep < 0.1
    assert again < 0.1
    assert awake > asleep + 0.05


def test_give_way_lets_other_threads_have_the_gil() -> None:
    interval = sys.getswitchinterval()
    go, had_it = threading.Lock(), threading.Event()

    def other() -> None:
        with go:
            had_it.set()

    go.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(2 * WAIT_S)  # no thread loses the GIL involuntarily
    try:
        go.release()
        until = time.monotonic() + WAIT_S
        while not had_it.is_set() and time.monotonic() < until:
            give_way()
        assert had_it.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_nothing_changes_on_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXPERIMENTS, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    watch_sockets()
    assert EXPERIMENTS not in os.environ
    monkeypatch.setenv(EXPERIMENTS, WITHOUT_EVENT_ENGINE)
    assert not PollWindow().enabled


def test_importing_grpc_too_early_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may import gRPC before it runs the command.

    Without this warning, nothing would show why its rounds over gRPC take 0.4 ms longer.
    """
    said: list[str] = []
    monkeypatch.setattr(polling.log, "warning", said.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv(EXPERIMENTS, WITHOUT_EVENT_ENGINE)
    watch_sockets()
    assert not said
    monkeypatch.delenv(EXPERIMENTS)
    watch_sockets()
    assert EXPERIMENTS not in os.environ, "it is too late for the setting to have an effect"
    assert len(said) == 1
    assert "imported before" in said[0]


def test_grpcio_exports_its_polling_period() -> None:
    """Without this export no wait would poll, and only a clock would show it."""
    poll_window = PollWindow(enabled=True)
    assert poll_window._period is not None
    assert poll_window._period.value == SLEEP_MS
