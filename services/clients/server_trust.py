"""The certificate authorities that clients trust, and errors that say why TLS with a server failed."""

from __future__ import annotations

import os
import ssl
from urllib.parse import urlsplit

import httpx

from outrider.shared.base.errors import ConfigurationError, UnavailableError

WRONG_NAME = (62, 64)
"""OpenSSL's codes for a certificate that lacks the name or the IP address of the URL."""
UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
"""OpenSSL's codes for a certificate whose authority is not trusted."""


def server_trust(url: str) -> ssl.SSLContext | bool:
    """Return httpx's parameter `verify` for a server.

    The authorities are those in the file SSL_CERT_FILE and the folders SSL_CERT_DIR. If neither variable is
    set, they are those of the package certifi. httpx reads these variables only together with the variables
    for proxies, which clients of a gateway must ignore.

    Args:
        url: Address of the server. Without TLS, the files are not read.

    Raises:
        ConfigurationError: SSL_CERT_FILE is not a readable PEM file with certificates.
    """
    if urlsplit(url).scheme.lower() != "https":
        return True
    file, folders = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if not file and not folders:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=file or None, capath=folders or None)
    except OSError as error:
        reason = "it contains no valid certificates" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigurationError(
            f"SSL_CERT_FILE={file} cannot be used: {reason}. Set the variable to a PEM file with the "
            "certificates of authorities.",
            field="SSL_CERT_FILE",
        ) from None


def tls_failure(error: httpx.TransportError, url: str) -> UnavailableError | None:
    """Return the error for a connection that TLS prevented, or None if `error` probably has another cause."""
    if urlsplit(url).scheme.lower() != "https":
        return None
    if isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError)):
        # With TLS 1.3, the client's handshake ends before the server has checked the client's certificate.
        return UnavailableError(
            f"{url} closed the connection without a reply. If the server requires client certificates "
            "(--tls-ca), use another client: the commands of Outrider cannot send one.",
            field="url",
        )
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if not isinstance(cause, ssl.SSLCertVerificationError):
        reason = cause.reason or cause
        return UnavailableError(
            f"TLS with {url} failed: {reason}. Does the server use TLS at this port?", field="url"
        )
    message = f"The certificate of {url} is not accepted: {cause.verify_message.rstrip('.')}."
    if cause.verify_code in UNKNOWN_AUTHORITY:
        message += " Set SSL_CERT_FILE to a PEM file with the certificate of its authority."
    elif cause.verify_code in WRONG_NAME:
        message += " Use a name or an address that the certificate contains."
    return UnavailableError(message, field="url")
