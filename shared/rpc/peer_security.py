"""TLS and the shared token between the services, for TCP addresses only.

This module imports gRPC only inside functions, because the command line imports this module for its flags.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.rpc.certificate_files import CertificateFiles, Certificates

if TYPE_CHECKING:
    import grpc

TOKEN_KEY = "x-outrider-token"
"""Metadata key of the token, which every call between services must contain if a token is configured."""
MIN_TOKEN_CHARS = 16


@dataclass(frozen=True, slots=True)
class PeerSecurity:
    """The certificates and the token of a service. The `repr` omits secrets.

    Attributes:
        certificate: PEM certificate chain of this service. A server with a certificate accepts only TLS.
        key: PEM private key of the certificate.
        ca: PEM certificates of the authority that signed the peers' certificates. A server with a CA requires
            client certificates (mTLS). A client with a CA connects by TLS.
        token: Secret that all services share. A server with a token refuses calls without it.
        files: The files from which the certificates were read. These files may change while the service runs.
            None if the certificates are not from files.
    """

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    files: CertificateFiles | None = field(default=None, repr=False, compare=False)

    @property
    def guards_servers(self) -> bool:
        """True if servers use TLS and require a client certificate or the token.

        Other hosts may then reach the servers.
        """
        return bool(self.certificate and (self.token or self.ca))

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return gRPC's credentials for a server, or None if there is no certificate.

        If the certificates are from files, every TLS handshake uses the current contents of the files. While
        these contents are not valid, the earlier contents stay in use.
        """
        import grpc

        if not self.certificate:
            return None
        pairs = [(self.key, self.certificate)]
        if self.files is None:
            return grpc.ssl_server_credentials(pairs, self.ca or None, bool(self.ca))
        files = self.files

        def changed() -> grpc.ServerCertificateConfiguration | None:
            if (found := files.changed()) is None:
                return None
            return grpc.ssl_server_certificate_configuration(
                [(found.key, found.certificate)], found.ca if self.ca else None
            )

        first = grpc.ssl_server_certificate_configuration(pairs, self.ca or None)
        return grpc.dynamic_ssl_server_credentials(
            first,
            changed,  # type: ignore[arg-type]  # grpc allows None
            bool(self.ca),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return gRPC's credentials for a channel, including the token, or None if there is no CA.

        A channel keeps the certificates with which it was opened, even if their files change. Open another
        channel with `renewed` to use the new certificates.
        """
        import grpc

        if not self.ca:
            return None
        credentials = grpc.ssl_channel_credentials(self.ca, self.key or None, self.certificate or None)
        if not self.token:
            return credentials
        metadata = self.metadata

        def add_token(_context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
            callback(metadata, None)

        plugin: grpc.AuthMetadataPlugin = add_token  # type: ignore[assignment]  # grpc only calls it
        return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(plugin))

    def renewed(self) -> PeerSecurity:
        """Return this security with the certificates that the files contain now.

        The result equals this security if the files have not changed, or if there are no files.
        """
        found = None if self.files is None else self.files.latest()
        if found is None:
            return self
        return replace(self, certificate=found.certificate, key=found.key, ca=found.ca)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata to add to every call: the token, if there is one."""
        return ((TOKEN_KEY, self.token),) if self.token else ()


NO_SECURITY = PeerSecurity()
_process = NO_SECURITY


def use_in_this_process(security: PeerSecurity) -> None:
    """Make `security` the default for the channels and servers of this process."""
    global _process
    _process = security


def of_this_process() -> PeerSecurity:
    """Return the default for the channels and servers of this process."""
    return _process


def refusal_of(code: str, details: str) -> str:
    """Return the reason if a call failed because one side does not trust the other. Otherwise, return "".

    Args:
        code: Name of the gRPC status with which a call failed.
        details: Details of the status.

    >>> refusal_of("UNAVAILABLE", "failed to connect to all addresses; Connection refused")
    ''
    """
    if code == "UNAUTHENTICATED":
        return details
    if "handshake failed" in details:
        return (
            f"The TLS handshake failed: {details}. Check that --peer-tls-ca names the authority of the "
            "peer's --peer-tls-cert, and that the certificate names the peer's address."
        )
    if "failed to connect" in details and ("Socket closed" in details or "Connection reset" in details):
        # A server that refuses a client's certificate closes the connection without a reason.
        return (
            "The peer closed the connection during the handshake. Check that both services have "
            "--peer-tls-cert, --peer-tls-key and --peer-tls-ca, and that the peer's authority has signed "
            "this service's certificate."
        )
    return ""


def load_security(
    certificate: Path | None, key: Path | None, ca: Path | None, token: Path | None, prefix: str = "peer_"
) -> PeerSecurity:
    """Read the certificate, key and token files that are named in a service's settings.

    Args:
        certificate: File with the PEM certificate chain of this service, or None.
        key: File with the PEM private key, or None. Other users must not be able to read the file.
        ca: File with the PEM certificates of the authority, or None.
        token: File with the token that all services share, or None. Other users must not be able to read the
            file.
        prefix: Text before the names of the settings in error messages.

    Raises:
        ConfigurationError: A file cannot be read, is not valid, or is a secret that other users can read.
    """
    names = {"certificate": f"{prefix}tls_cert", "key": f"{prefix}tls_key", "ca": f"{prefix}tls_ca"}
    if (certificate is None) != (key is None):
        missing = names["key"] if key is None else names["certificate"]
        raise ConfigurationError(
            f"{missing}: set {names['certificate']} and {names['key']} together.", field=missing
        )

    def read() -> Certificates:
        found = Certificates(
            _read(certificate, names["certificate"]),
            _read(key, names["key"], secret=True),
            _read(ca, names["ca"]),
        )
        _check_certificates(certificate, key, ca, names)
        return found

    files = CertificateFiles([path for path in (certificate, key, ca) if path is not None], read)
    found = read()
    return PeerSecurity(
        found.certificate,
        found.key,
        found.ca,
        _token(token, f"{prefix}token_file"),
        files if certificate or ca else None,
    )


def _check_certificates(
    certificate: Path | None, key: Path | None, ca: Path | None, names: Mapping[str, str]
) -> None:
    """Raise ConfigurationError unless the files contain PEM certificates and the key that belongs to them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate is not None and key is not None:
        try:
            context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"{names['certificate']}: {certificate} and {key} are not a PEM certificate and its key: "
                f"{error}.",
                field=names["certificate"],
            ) from None
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"{names['ca']}: {ca} contains no PEM certificates: {error}.", field=names["ca"]
            ) from None


def _read(file: Path | None, name: str, *, secret: bool = False) -> bytes:
    if file is None:
        return b""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(1 << 20)
    except OSError as error:
        raise ConfigurationError(f"{name}: {file} cannot be read: {error.strerror}.", field=name) from None
    if secret and mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigurationError(
            f"{name}: other users can read or change {file}. Run: chmod go-w,o-r {file}", field=name
        )
    return content


def _token(file: Path | None, name: str) -> str:
    text = _read(file, name, secret=True).decode("ascii", "replace").strip()
    if file is not None and (len(text) < MIN_TOKEN_CHARS or not text.isascii() or not text.isprintable()):
        raise ConfigurationError(
            f"{name}: {file} must contain one token of at least {MIN_TOKEN_CHARS} printable ASCII "
            "characters. Make one by: openssl rand -hex 32",
            field=name,
        )
    return text
