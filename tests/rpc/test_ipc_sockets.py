"""Unix sockets: server and client refuse other users, dead listeners are replaced, addresses are checked."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from outrider.shared.base.errors import ConfigurationError, ProtocolError
from outrider.shared.rpc.address import IpcAddress, check_address, grpc_address
from outrider.shared.rpc.ipc import sockets
from outrider.shared.rpc.ipc.sockets import Listener, connect, peer_uid


def test_only_the_owner_can_open_the_socket(tmp_path: Path) -> None:
    listener = Listener(f"{tmp_path}/s")
    try:
        mode = os.lstat(f"{tmp_path}/s").st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        with connect(f"{tmp_path}/s", 1.0) as client:
            served = listener.accept()
            assert served is not None
            assert peer_uid(served) == os.geteuid() == peer_uid(client)
            served.close()
    finally:
        listener.close()
    assert not Path(f"{tmp_path}/s").exists()


def test_a_connection_from_another_user_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([os.geteuid() + 1, os.geteuid()])
    listener = Listener(f"{tmp_path}/s")
    clients = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    try:
        for client in clients:
            client.connect(f"{tmp_path}/s")
        monkeypatch.setattr(sockets, "peer_uid", lambda connection: next(users))
        served = listener.accept()
        assert served is not None
        clients[0].settimeout(5.0)
        assert clients[0].recv(1) == b"", "the first connection was closed"
        served.send(b"x")
        assert clients[1].recv(1) == b"x", "the second was accepted"
        served.close()
    finally:
        for client in clients:
            client.close()
        listener.close()


def test_connecting_to_another_users_listener_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(f"{tmp_path}/s")
    try:
        monkeypatch.setattr(sockets, "peer_uid", lambda connection: os.geteuid() + 1)
        with pytest.raises(ProtocolError, match="Run both as the same user"):
            connect(f"{tmp_path}/s", 1.0)
    finally:
        listener.close()


def test_the_file_of_a_dead_listener_is_replaced(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(f"{tmp_path}/s")
    dead.close()
    listener = Listener(f"{tmp_path}/s")
    connect(f"{tmp_path}/s", 1.0).close()
    listener.close()


def test_a_running_listener_is_not_replaced(tmp_path: Path) -> None:
    listener = Listener(f"{tmp_path}/s")
    with pytest.raises(ConfigurationError, match="another process already does"):
        Listener(f"{tmp_path}/s")
    connect(f"{tmp_path}/s", 1.0).close()
    listener.close()


def test_a_file_that_is_not_a_socket_is_kept(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigurationError, match="is not a socket"):
        Listener(f"{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "mine"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="mkdir -m 700"):
        Listener(f"{folder}/s")
    with pytest.raises(ConfigurationError, match="Create the folder first"):
        Listener(f"{tmp_path}/missing/s")


def test_closing_ends_accept(tmp_path: Path) -> None:
    listener = Listener(f"{tmp_path}/s")
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(listener.accept()))
    thread.start()
    listener.close()
    thread.join(5.0)
    assert answers == [None]


class Full:
    """Simulates a process without free descriptors, and the event that `accept` waits on.

    The event is set at the last of `tries`.
    """

    def __init__(self, number: int, tries: int) -> None:
        self.number, self.tries, self.asked, self.waits = number, tries, 0, 0

    def accept(self) -> tuple[socket.socket, str]:
        self.asked += 1
        raise OSError(self.number, "full")

    def fileno(self) -> int:
        return -1

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s == sockets.FULL_PAUSE_S
        self.waits += 1
        return self.waits == self.tries

    def set(self) -> None:
        pass


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_descriptors_accept_pauses_between_tries_and_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    listener = Listener(f"{tmp_path}/s")
    full = Full(number, tries=5)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(listener, "_socket", full)
            patched.setattr(listener, "_closed", full)
            assert listener.accept() is None, "closed during the pause"
        assert full.asked == full.waits == 5
        with connect(f"{tmp_path}/s", 1.0):
            served = listener.accept()
            assert served is not None, "descriptors are available again"
            served.close()
    finally:
        listener.close()


def test_addresses() -> None:
    parsed = IpcAddress.parse("ipc:///run/x/draft.sock", "draft")
    assert parsed is not None
    assert (parsed.streams, parsed.grpc) == ("/run/x/draft.sock.ipc", "unix:/run/x/draft.sock")
    assert IpcAddress.parse("unix:/run/x", "draft") is None
    assert grpc_address("ipc:///run/x", "draft") == "unix:/run/x"
    assert grpc_address("localhost:1", "draft") == "localhost:1"
    longest = "ipc:///" + "x" * 102
    assert IpcAddress.parse(longest, "draft") is not None


@pytest.mark.parametrize("address", ["ipc://run/x", "ipc:///", "ipc:/run/x", "ipc:", "ipc:///run/"])
def test_a_path_that_is_not_absolute_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="absolute path") as error:
        IpcAddress.parse(address, "listen")
    assert error.value.field == "listen"


def test_a_path_that_is_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"longer than 103 bytes.*Use a shorter one, in a folder under /run"
    ) as caught:
        IpcAddress.parse("ipc:///" + "x" * 103, "listen")
    assert caught.value.field == "listen"
    with pytest.raises(ConfigurationError, match=r"longer than 107 bytes.*Use a shorter one"):
        check_address("unix:/" + "x" * 107, "listen")


def test_only_a_draft_may_have_an_ipc_address() -> None:
    with pytest.raises(ConfigurationError):
        check_address("ipc:///run/x", "target")
