"""Opens gRPC channels (sync and asyncio) with this project's options, and retries idempotent calls."""

from __future__ import annotations

import json

import grpc

from outrider.shared.rpc.address import check_address
from outrider.shared.rpc.options import INTERNAL_MESSAGE_LIMIT, Options, channel_options

# Unary calls without side effects. The transport never retries a stream. The code that opened a stream also
# reopens the stream.
IDEMPOTENT_METHODS = (
    {"service": "outrider.target.v1.Target", "method": "GetInfo"},
    {"service": "outrider.target.v1.Target", "method": "GetStats"},
    {"service": "outrider.draft.v1.Draft", "method": "GetInfo"},
    {"service": "grpc.health.v1.Health", "method": "Check"},
)


def open_channel(address: str, *, max_message_bytes: int = INTERNAL_MESSAGE_LIMIT) -> grpc.Channel:
    """Open a channel to ``host:port`` or ``unix:/path``. The channel connects and reconnects on its own."""
    return grpc.insecure_channel(check_address(address, "address"), options=_options(max_message_bytes))


def connect_aio(address: str, *, max_message_bytes: int = INTERNAL_MESSAGE_LIMIT) -> grpc.aio.Channel:
    """Open an asyncio channel. Call this inside the running loop."""
    return grpc.aio.insecure_channel(check_address(address, "address"), options=_options(max_message_bytes))


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
