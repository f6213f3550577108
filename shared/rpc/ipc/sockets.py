"""Opens unix sockets for processes of the same user only, and connects to them.

The socket's file has mode 0600, and other users must not be able to write to the folder of the file. Both
processes also check the credentials of their peer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import threading
from pathlib import Path

from outrider.shared.base.errors import ConfigurationError, ProtocolError
from outrider.shared.obs.logging import get_logger

# struct ucred: pid, uid, gid.
CREDENTIALS = struct.Struct("iII")
BACKLOG = 16
BUFFER_BYTES = 4 * 1024 * 1024
FULL_PAUSE_S = 0.1
"""How long `accept` pauses when the process has no free file descriptor for a new connection.

Immediate retries would keep a core busy.
"""

log = get_logger("outrider.rpc.ipc")


class Listener:
    """A listening unix socket for processes of the same user. `close` removes the socket's file.

    Args:
        path: Absolute path of the socket's file. A file that a dead process has left there is replaced.

    Raises:
        ConfigurationError: The folder is missing, other users can write to the folder, another process
            listens on the path, or the file is not a socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._closed = threading.Event()
        _check_folder(Path(path).parent)
        _remove_stale(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(path)
            # No process can connect before `listen`, so the file's wider mode until here does no harm.
            os.chmod(path, 0o600)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(
                f"Cannot listen on {path}: {error.strerror}.", field="listen", reason="address_in_use"
            ) from None

    def accept(self) -> socket.socket | None:
        """Wait for a connection from a process of this user. Return None once the listener is closed.

        Connections from other users are refused.
        """
        told = False
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EINTR):
                    continue
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return None
                if not told:
                    log.warning(
                        "no file descriptor left for a connection", path=self.path, reason=error.strerror
                    )
                told = True
                if self._closed.wait(FULL_PAUSE_S):
                    return None
                continue
            if (uid := peer_uid(connection)) == os.geteuid():
                return _tuned(connection)
            log.warning("refused a process of another user", uid=uid, path=self.path)
            connection.close()

    def close(self) -> None:
        """Stop listening and remove the file. May be called more than once."""
        self._closed.set()
        with contextlib.suppress(OSError):
            # Wake up a thread in `accept`, because closing the socket alone does not.
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._socket.fileno() >= 0:
            self._socket.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def connect(path: str, timeout_s: float) -> socket.socket:
    """Connect to the unix socket of a `Listener` that the same user runs.

    Raises:
        OSError: No process listens on the path, or no process accepts the connection within `timeout_s`.
        ProtocolError: The listener belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        if (uid := peer_uid(connection)) != os.geteuid():
            raise ProtocolError(
                f"{path} belongs to a process of user {uid}, not of {os.geteuid()}. "
                "Run both as the same user.",
                field="draft",
            )
    except BaseException:
        connection.close()
        raise
    return _tuned(connection)


def peer_uid(connection: socket.socket) -> int:
    """Return the effective user id of the process at the other end, as the kernel reports it."""
    _pid, uid, _gid = CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    )
    return int(uid)


def _tuned(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return connection


def _check_folder(folder: Path) -> None:
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(
            f"listen: {folder}: {error.strerror}. Create the folder first (mkdir -m 700).", field="listen"
        ) from None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"listen: other users may write to {folder}. "
            "Put the socket into a folder of your own (mkdir -m 700).",
            field="listen",
        )


def _remove_stale(path: str) -> None:
    """Remove the socket file of a listener that no longer exists."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(
            f"listen: {path} exists and is not a socket. Remove it or choose another path.", field="listen"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError:
            pass
    raise ConfigurationError(
        f"Cannot listen on {path}: another process already does.", field="listen", reason="address_in_use"
    )
