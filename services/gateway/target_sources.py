"""Sources of the targets' addresses: the setting `target` itself, a file, or a DNS name.

An entry of the setting such as ``HOST:PORT`` or ``unix:/path`` is itself an address. ``file:///path`` names a
file with one address per line. ``dns:///NAME:PORT`` contains a DNS name. All IP addresses of this name are
targets. The gateway reads the file and looks up the name again at intervals.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.rpc.address import check_address

FILE_SCHEME = "file://"
DNS_SCHEME = "dns:///"
MAX_ADDRESSES = 256
MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class TargetSource:
    """One entry of the setting `target`.

    Attributes:
        text: The text of the entry.
        field: Name of the setting, for errors.
    """

    text: str
    field: str = "target"

    @property
    def changes(self) -> bool:
        """Whether the addresses can change. If they can, the source must be read again at intervals."""
        return self.text.startswith((FILE_SCHEME, DNS_SCHEME))

    def check(self) -> None:
        """Check one entry of the setting `target`. A file must exist. A DNS name need not resolve yet.

        Raises:
            ConfigurationError: If the entry is malformed or its file cannot be used.
        """
        if self.text.startswith(FILE_SCHEME):
            self._read_file()
        else:
            check_address(self.text.removeprefix(DNS_SCHEME), self.field)

    async def addresses(self) -> tuple[str, ...]:
        """Return the current addresses of the targets, in the order of the setting or of the file.

        Raises:
            ConfigurationError: If the file cannot be used or the DNS name does not resolve.
        """
        if self.text.startswith(FILE_SCHEME):
            return await asyncio.to_thread(self._read_file)
        if self.text.startswith(DNS_SCHEME):
            return await self._resolve()
        return (self.text,)

    def _read_file(self) -> tuple[str, ...]:
        path = Path(self.text.removeprefix(FILE_SCHEME))
        try:
            with path.open("rb") as file:
                lines = file.read(MAX_FILE_BYTES).decode("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self.field}: {path} cannot be read as text: {error}.", field=self.field
            ) from None
        entries = [line.partition("#")[0].strip() for line in lines]
        found = tuple(check_address(entry, f"{self.field}: {path}") for entry in entries if entry)
        if not 1 <= len(found) <= MAX_ADDRESSES:
            raise ConfigurationError(
                f"{self.field}: {path} must have 1 to {MAX_ADDRESSES} addresses, one a line.",
                field=self.field,
            )
        return found

    async def _resolve(self) -> tuple[str, ...]:
        host, _, port = self.text.removeprefix(DNS_SCHEME).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise ConfigurationError(
                f"{self.field}: The name {host} cannot be resolved: {error}.", field=self.field
            ) from None
        hosts = sorted({str(address[0]) for *_, address in found})[:MAX_ADDRESSES]
        return tuple(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts)
