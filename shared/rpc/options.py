"""gRPC channel arguments that must match on both ends: message limits, keepalive, reconnect back-off."""

from __future__ import annotations

import resource

MIB = 1024 * 1024
INTERNAL_MESSAGE_LIMIT = 64 * MIB
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
HANDSHAKE_TIMEOUT_MS = 10_000

MAX_CONNECTIONS = 65_536
OPEN_FILES_SHARE = 4
"""The limit of open files, divided by this number, is the limit of connections of a gRPC server."""

Options = list[tuple[str, int | str]]


def connection_limit() -> int:
    """Return the largest number of connections that one gRPC server of this process accepts.

    It is a quarter of the limit of open files. A caller needs no key to connect, so connections that send
    nothing must leave enough descriptors for everything else.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = soft == resource.RLIM_INFINITY
    return MAX_CONNECTIONS if unlimited else max(1, min(soft // OPEN_FILES_SHARE, MAX_CONNECTIONS))


def _limits(max_message_bytes: int, max_received_bytes: int | None = None) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_received_bytes or max_message_bytes),
    ]


def server_options(
    max_message_bytes: int = INTERNAL_MESSAGE_LIMIT,
    max_received_bytes: int | None = None,
    max_idle_s: float | None = None,
) -> Options:
    """Return the options of a gRPC server.

    The options allow keepalive pings on quiet streams. gRPC's defaults would answer such pings by closing the
    connection (GOAWAY, too_many_pings).

    Args:
        max_message_bytes: Largest message to send, in bytes.
        max_received_bytes: Largest message to receive. If None, it equals `max_message_bytes`.
        max_idle_s: Seconds after which a connection without calls is closed. With None, it stays open.
    """
    idle: Options = [] if max_idle_s is None else [("grpc.max_connection_idle_ms", round(max_idle_s * 1e3))]
    return [
        *idle,
        *_limits(max_message_bytes, max_received_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # A connection is closed if the client does not send its settings in this time, or does not confirm
        # the server's settings. gRPC's own limit of the second time is 60 s.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.settings_timeout", HANDSHAKE_TIMEOUT_MS),
        # The server closes further connections as soon as it has accepted them.
        ("grpc.max_allowed_incoming_connections", connection_limit()),
        # Otherwise a second server could bind the same port, and each connection would reach a random one of
        # the two.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(max_message_bytes: int = INTERNAL_MESSAGE_LIMIT) -> Options:
    """Return the client's options. The client reconnects to a restarted peer within half a second."""
    return [
        *_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        # Peers are configured by address, so ignore any proxy that the environment names.
        ("grpc.enable_http_proxy", 0),
    ]
