"""The certificate with which `outrider up` checks a gateway that accepts only clients with certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from outrider.shared.base.errors import ConfigurationError


def probe_context(certificate: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext | bool:
    """Return the TLS parameter with which the health probes of `outrider up` connect to their own gateway.

    The probes send no secret, so the gateway's certificate need not name the loopback address. A gateway with
    a certificate authority (CA) for clients accepts only clients with a certificate. The probes then send the
    gateway's own certificate.

    Args:
        certificate, key: Files with the gateway's certificate and key, or None.
        ca: File with the authority that signs the certificates of clients, or None.

    Returns:
        An SSL context, or False if the probes send no certificate.
    """
    if ca is None or certificate is None:
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(certificate, key)
    return context


def check_own_certificate(certificate: Path, key: Path | None, ca: Path) -> None:
    """Check that a gateway accepts its own certificate as a client certificate.

    Raises:
        ConfigurationError: The certificate authority for clients has not signed the gateway's certificate, or
            the certificate is not valid for clients.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    server.load_verify_locations(ca)
    server.verify_mode = ssl.CERT_REQUIRED
    client = probe_context(certificate, key, ca)
    assert isinstance(client, ssl.SSLContext)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        waiting = list(ends)
        while waiting:
            for end in tuple(waiting):
                try:
                    end.do_handshake()
                    waiting.remove(end)
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"tls_ca: `outrider up` checks its gateway with the gateway's own certificate, but {ca} does not "
            f"accept {certificate} as the certificate of a client ({error.reason or error}). Use a "
            "certificate that this authority has signed for servers and clients, or start the services one "
            "by one.",
            field="tls_ca",
        ) from None
