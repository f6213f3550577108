"""A certificate authority that lives as long as a test, made by the command `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class ThrowawayCa:
    """An authority whose certificates name the loopback addresses."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.cert = folder / "ca.pem"
        _openssl("-x509", "-subj", "/CN=throwaway", "-keyout", folder / "ca.key", "-out", self.cert)

    def issue(self, name: str) -> Certificate:
        """Return a new certificate for servers and clients on this host."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        _openssl(
            *("-x509", "-CA", self.cert, "-CAkey", self._folder / "ca.key", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", made.key, "-out", made.cert),
        )
        made.key.chmod(0o600)
        return made


def _openssl(*arguments: str | Path) -> None:
    command = ["openssl", "req", *NEW_KEY, *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
