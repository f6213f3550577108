"""Children that run but do not answer are killed and restarted. The children are small UDP servers."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path

from outrider.services.stack.liveness import Liveness, Socket, service_sockets
from outrider.services.stack.supervisor import ChildSpec, Supervisor

WAIT_S = 20
ANSWERS = """
import os, socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 0))
print(os.getpid(), server.getsockname()[1], flush=True)
while True:
    server.sendto(*server.recvfrom(64))
"""
SILENT = "import os, signal; print(os.getpid(), 0, flush=True); signal.pause()"


class Pair:
    """Notes what children say, and probes them."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.answered = threading.Event()
        self.failed = threading.Semaphore(0)
        self.port = 0

    def echo(self, _name: str, line: str) -> None:
        self.lines.put(line)

    def next_start(self) -> int:
        """Return the process id of the next run that reports its start."""
        while True:
            words = self.lines.get(timeout=WAIT_S).split()
            if len(words) == 2 and all(word.isdigit() for word in words):
                self.port = int(words[1])
                return int(words[0])

    def probe(self) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(0.2)
            try:
                client.sendto(b"?", ("127.0.0.1", self.port or 9))
                client.recv(64)
            except OSError:
                self.failed.release()
                return False
        self.answered.set()
        return True


def test_a_suspended_child_is_killed_and_restarted() -> None:
    pair = Pair()
    spec = ChildSpec("child", (sys.executable, "-c", ANSWERS), 10.0)
    with Supervisor([spec], pair.echo) as supervisor:
        supervisor.settle()
        first = pair.next_start()
        with Liveness(supervisor, {"child": pair.probe}, hung_after_s=0.1, interval_s=0.01):
            assert pair.answered.wait(WAIT_S)
            os.kill(first, signal.SIGSTOP)
            second = pair.next_start()
            assert second != first
            pair.answered.clear()
            assert pair.answered.wait(WAIT_S)
        assert supervisor.child("child").starts == 2


def test_a_child_that_is_still_starting_is_left_alone() -> None:
    """Loading a model may take minutes. Silence counts only after the first answer."""
    pair = Pair()
    spec = ChildSpec("child", (sys.executable, "-c", SILENT), 10.0)
    with Supervisor([spec], pair.echo) as supervisor:
        supervisor.settle()
        pair.next_start()
        with Liveness(supervisor, {"child": pair.probe}, hung_after_s=0.0, interval_s=0.01):
            for _ in range(3):
                assert pair.failed.acquire(timeout=WAIT_S)
        assert supervisor.child("child").starts == 1


def test_a_child_whose_socket_is_gone_is_restarted_with_its_client(tmp_path: Path) -> None:
    pair = Pair()
    path = tmp_path / "child.sock"
    path.touch()
    clients: queue.Queue[int] = queue.Queue()

    def echo(name: str, line: str) -> None:
        if name == "child":
            pair.echo(name, line)
        elif line.endswith(" 0"):
            clients.put(int(line.split()[0]))

    children = [
        ChildSpec("child", (sys.executable, "-uc", ANSWERS)),
        ChildSpec("client", (sys.executable, "-uc", SILENT)),
    ]

    with Supervisor(children, echo) as supervisor:
        first, client = pair.next_start(), clients.get(timeout=WAIT_S)
        supervisor.settle()
        sockets = {"child": Socket(path, "client")}
        with Liveness(supervisor, {"child": pair.probe}, sockets, interval_s=0.01):
            # 1. As long as the socket exists, a restart of the client leaves the child alone.
            assert pair.answered.wait(WAIT_S)
            os.kill(client, signal.SIGKILL)
            client = clients.get(timeout=WAIT_S)
            pair.answered.clear()
            assert pair.answered.wait(WAIT_S)
            assert supervisor.child("child").process_id == first
            # 2. Without the socket, the restarted client could not reach it.
            path.unlink()
            os.kill(client, signal.SIGKILL)
            clients.get(timeout=WAIT_S)
            assert pair.next_start() != first


def test_a_socket_that_is_gone_before_the_first_probe_is_noticed_too(tmp_path: Path) -> None:
    starts: dict[str, queue.Queue[int]] = {"child": queue.Queue(), "client": queue.Queue()}

    def echo(name: str, line: str) -> None:
        if line.endswith(" 0"):
            starts[name].put(int(line.split()[0]))

    children = [ChildSpec(name, (sys.executable, "-uc", SILENT)) for name in starts]
    with Supervisor(children, echo) as supervisor:
        first, client = [starts[name].get(timeout=WAIT_S) for name in ("child", "client")]
        supervisor.settle()
        sockets = {"child": Socket(tmp_path / "child.sock", "client")}
        with Liveness(supervisor, {"child": lambda: False}, sockets, interval_s=0.01):
            os.kill(client, signal.SIGKILL)
            assert starts["child"].get(timeout=WAIT_S) != first


def test_sockets_are_files_only() -> None:
    assert service_sockets("unix:/run/target.sock", None) == {
        "target": Socket(Path("/run/target.sock"), "gateway")
    }
    assert service_sockets("127.0.0.1:1", "127.0.0.1:2") == {}
