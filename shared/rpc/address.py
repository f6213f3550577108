"""Addresses: ``host:port`` or ``unix:/path``, and who may reach them."""

from __future__ import annotations

import ipaddress

from outrider.shared.base.errors import ConfigurationError

# sun_path holds 108 bytes with its terminating zero.
MAX_UNIX_PATH_BYTES = 107


def check_address(address: str, field: str) -> str:
    """Return `address` if it is ``host:port`` or ``unix:/absolute/path``; raise ConfigurationError naming `field` otherwise."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ConfigurationError(
                f"{field}: a unix socket needs an absolute path (unix:/run/outrider/target.sock), not {address!r}.", field=field
            )
        if len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise ConfigurationError(f"{field}: the socket path is longer than {MAX_UNIX_PATH_BYTES} bytes: {path}.", field=field)
        return f"unix:{path}"
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{field}: expected host:port (a port is at most 65535) or unix:/path, not {address!r}.", field=field)
    return address


def is_local(host: str) -> bool:
    """Whether only this host can reach a listener on `host` (a loopback address or ``localhost``)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_listen_address(address: str, field: str, *, allow_remote: bool) -> str:
    """Check an address that an internal service without authentication listens on.

    Raises:
        ConfigurationError: it is malformed, or other hosts could reach it and `allow_remote` is off.
    """
    checked = check_address(address, field)
    if not allow_remote and not checked.startswith("unix:") and not is_local(checked.rpartition(":")[0]):
        raise ConfigurationError(
            f"{field}: {address} is reachable from other hosts, and this port has no authentication. "
            "Listen on 127.0.0.1 or unix:/path, or pass --insecure.",
            field=field,
        )
    return checked
