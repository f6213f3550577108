"""The settings that all services share: certificates and the token between services."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from outrider.shared.base.settings import TracedSettings
from outrider.shared.rpc.address import check_listen_address
from outrider.shared.rpc.peer_security import PeerSecurity, load_security, use_in_this_process


class PeerSettings(TracedSettings):
    """Base class of the settings of services that talk to each other."""

    peer_tls_cert: Path | None = Field(
        None, description="PEM certificate of this service, for TLS between services on TCP addresses."
    )
    peer_tls_key: Path | None = Field(None, description="PEM private key of --peer-tls-cert.")
    peer_tls_ca: Path | None = Field(
        None,
        description="PEM certificates of the authority that signs the other services' certificates. If set, "
        "connections to these services use TLS, and callers of this service need a certificate.",
    )
    peer_token_file: Path | None = Field(
        None, description="File with a token that all services share. Calls over TCP need this token."
    )

    def peer_security(self) -> PeerSecurity:
        """Read the service's certificates, key and token from their files.

        Raises:
            ConfigurationError: A file cannot be read, is not valid, or is a secret that other users can read.
        """
        return load_security(self.peer_tls_cert, self.peer_tls_key, self.peer_tls_ca, self.peer_token_file)

    def secure_process(self) -> None:
        """Use these files for all channels and servers of this process. Raises like `peer_security`."""
        use_in_this_process(self.peer_security())


class ListenerSettings(PeerSettings):
    """Base class of the settings of target and draft, which only other services call."""

    insecure: bool = Field(
        False, description="Allow addresses that other hosts can reach, without TLS and a token."
    )

    def check_listen(self, address: str) -> None:
        """Check the listen address of this service, and its certificate, key and token files.

        Raises:
            ConfigurationError: One of these files is not valid (see `peer_security`), or other hosts could
                reach the address although the certificate or the token is missing.
        """
        trusted = self.peer_security().guards_servers
        check_listen_address(address, "listen", allow_remote=self.insecure or trusted)
