"""Parses and checks the addresses ``host:port``, ``unix:/path`` and ``ipc:///path``.

This module also refuses a listen address of an internal service if other hosts could reach this address. An
address ``ipc:///path`` connects a target and a draft on one host.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from outrider.shared.base.errors import ConfigurationError

# sun_path holds 108 bytes, including its terminating zero.
MAX_UNIX_PATH_BYTES = 107
IPC_SCHEME = "ipc://"
IPC_SUFFIX = ".ipc"


@dataclass(frozen=True, slots=True)
class IpcAddress:
    """An ``ipc:///path`` address. It determines the paths of two unix sockets in one folder.

    One socket carries the streams between target and draft. The other socket serves gRPC.

    Attributes:
        path: The path in the address, as the user wrote it.
    """

    path: str

    @property
    def streams(self) -> str:
        """Path of the socket for the streams between target and draft."""
        return self.path + IPC_SUFFIX

    @property
    def grpc(self) -> str:
        """gRPC address for health, weights and information, and for targets that do not support ipc."""
        return f"unix:{self.path}"

    @classmethod
    def parse(cls, address: str, field: str) -> IpcAddress | None:
        """Parse an address ``ipc:///path``. Return None if `address` does not begin with ``ipc:``.

        Raises:
            ConfigurationError: The path is not absolute or is too long. The message names `field`.
        """
        if not address.startswith("ipc:"):
            return None
        path = address.removeprefix(IPC_SCHEME)
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigurationError(
                f"{field}: the colocated transport needs an absolute path (ipc:///run/outrider/draft.sock), "
                f"not {address!r}.",
                field=field,
            )
        if len(path.encode()) > MAX_UNIX_PATH_BYTES - len(IPC_SUFFIX):
            longest = MAX_UNIX_PATH_BYTES - len(IPC_SUFFIX)
            raise _too_long(path, longest, field)
        return cls(path)


def grpc_address(address: str, field: str) -> str:
    """Return the address for gRPC calls: ``unix:/path`` for ``ipc:///path``, else the checked `address`."""
    ipc = IpcAddress.parse(address, field)
    return check_address(address, field) if ipc is None else ipc.grpc


def check_address(address: str, field: str) -> str:
    """Return `address` if it is ``host:port`` or ``unix:/absolute/path``, in gRPC's notation.

    Raises:
        ConfigurationError: The address has neither form. The message names `field`.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ConfigurationError(
                f"{field}: a unix socket needs an absolute path (unix:/run/outrider/target.sock), "
                f"not {address!r}.",
                field=field,
            )
        if len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise _too_long(path, MAX_UNIX_PATH_BYTES, field)
        return f"unix:{path}"
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(
            f"{field}: expected host:port (a port is at most 65535) or unix:/path, not {address!r}.",
            field=field,
        )
    return address


def _too_long(path: str, longest: int, field: str) -> ConfigurationError:
    message = (
        f"{field}: the socket path is longer than {longest} bytes: {path}. "
        "Use a shorter one, in a folder under /run or /tmp."
    )
    return ConfigurationError(message, field=field)


def is_local(host: str) -> bool:
    """Return whether only this host can reach a listener on `host` (a loopback address or ``localhost``)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_listen_address(address: str, field: str, *, allow_remote: bool) -> str:
    """Check the listen address of an internal service.

    Raises:
        ConfigurationError: The address is malformed, or other hosts could reach it and `allow_remote` is
            false.
    """
    checked = check_address(address, field)
    if not allow_remote and not checked.startswith("unix:") and not is_local(checked.rpartition(":")[0]):
        raise ConfigurationError(
            f"{field}: {address} is reachable from other hosts, and this port has no authentication. "
            "Listen on 127.0.0.1 or unix:/path, set --peer-tls-cert, --peer-tls-key and --peer-token-file, "
            "or pass --insecure.",
            field=field,
        )
    return checked
