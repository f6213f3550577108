"""Opens gRPC channels (sync and asyncio) with this project's options, and retries idempotent calls."""

from __future__ import annotations

import json

import grpc

from outrider.shared.rpc.address import check_address
from outrider.shared.rpc.options import INTERNAL_MESSAGE_LIMIT, Options, channel_options
from outrider.shared.rpc.peer_security import NO_SECURITY, PeerSecurity, of_this_process
from outrider.shared.rpc.peer_token import aio_interceptors, with_token

# Unary calls without side effects. The transport never retries a stream. The code that opened a stream also
# reopens the stream.
IDEMPOTENT_METHODS = (
    {"service": "outrider.target.v1.Target", "method": "GetInfo"},
    {"service": "outrider.target.v1.Target", "method": "GetStats"},
    {"service": "outrider.draft.v1.Draft", "method": "GetInfo"},
    {"service": "grpc.health.v1.Health", "method": "Check"},
)


def open_channel(
    address: str,
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_LIMIT,
    security: PeerSecurity | None = None,
) -> grpc.Channel:
    """Open a gRPC channel to ``host:port`` or ``unix:/path``. The channel connects and reconnects by itself.

    `security` applies to TCP addresses only. If `security` is None, the channel uses the settings of this
    process (`peer_security`), with the certificates that their files contain now.
    """
    address, security = _secured(address, security)
    options = _options(max_message_bytes)
    if credentials := security.channel_credentials():
        return grpc.secure_channel(address, credentials, options=options)
    channel = grpc.insecure_channel(address, options=options)
    return with_token(channel, security.metadata) if security.token else channel


def connect_aio(
    address: str,
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_LIMIT,
    security: PeerSecurity | None = None,
) -> grpc.aio.Channel:
    """Open an asyncio channel, as `open_channel` does. Call this inside the running loop."""
    address, security = _secured(address, security)
    options = _options(max_message_bytes)
    if credentials := security.channel_credentials():
        return grpc.aio.secure_channel(address, credentials, options=options)
    interceptors = aio_interceptors(security.metadata) if security.token else None
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)


def _secured(address: str, security: PeerSecurity | None) -> tuple[str, PeerSecurity]:
    address = check_address(address, "address")
    if address.startswith("unix:"):
        return address, NO_SECURITY
    return address, of_this_process().renewed() if security is None else security


def _options(max_message_bytes: int) -> Options:
    retry = {
        "maxAttempts": 3,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    service_config = {"methodConfig": [{"name": list(IDEMPOTENT_METHODS), "retryPolicy": retry}]}
    # Use a separate subchannel pool per channel. Otherwise channels to one address with equal options would
    # share one connection, and bulk data would delay commits.
    return [
        *channel_options(max_message_bytes),
        ("grpc.service_config", json.dumps(service_config)),
        ("grpc.use_local_subchannel_pool", 1),
    ]
