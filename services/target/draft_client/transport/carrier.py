"""`Carrier`, the interface between the draft client and the transports that carry its messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport.exchange import Exchange
from outrider.shared.rpc.tensors import TensorWriter
from outrider.shared.rpc.version import Feature

CONNECT_TIMEOUT_S = 0.25
HANDSHAKE_TIMEOUT_S = 60.0
LEND_TIMEOUT_S = 300.0
"""Limit for sending borrowed tensors. The draft answers after its warm-up, which may compile kernels."""


class ConnectionLost(Exception):
    """The draft cannot be reached, or the connection to it has ended."""


class Carrier(Protocol):
    """Transport of one connection to a draft service: sends and receives the draft protocol's messages.

    A separate thread opens the connection and waits for its end. The engine thread sends and receives.

    Attributes:
        ended: An event that is set when the connection has ended. It is set before any method reports the
            end.
        tensors: Puts the feature rows of commits into the message that carries the commits. Engine thread
            only.
        rows_follow_open: True if the feature rows of `send_rows` cannot overtake earlier messages. They can
            then be sent before OpenAck has arrived.
        exchange: Carries the states and trees of rounds on the device. None if all rounds run through the
            host.
    """

    ended: threading.Event
    tensors: TensorWriter
    rows_follow_open: bool
    exchange: Exchange | None

    def hello(self, hello: draft_pb2.Hello) -> draft_pb2.HelloAck:
        """Connect to the draft service and perform the handshake.

        Raises:
            ConnectionLost: The draft service cannot be reached, or the connection ended.
            OutriderError: The draft service refuses this target. The message gives the reason.
        """
        ...

    def get_tensor(self, name: str) -> Iterable[common_pb2.TensorChunk]:
        """Yield the chunks of one of the draft's tensors. Raise the same errors as `hello`."""
        ...

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        """Send tensors that the draft borrows. Raise the same errors as `hello`."""
        ...

    def open_bulk(self, target_id: str, features: frozenset[Feature]) -> None:
        """Open the bulk stream, i.e. the second stream for large messages, and the channel for tensors.

        This method raises the same errors as `hello`.

        Args:
            target_id: Identifier of this target.
            features: The protocol features that both sides support. Without SLOTTED_ROUNDS, the carrier
                offers no rounds on the device.
        """
        ...

    def follow(self, on_pong: Callable[[draft_pb2.Pong], None]) -> None:
        """Receive pongs until the connection has ended. Call on the link's thread after the handshake."""
        ...

    def send(self, message: draft_pb2.SessionRequest) -> None:
        """Send on the session stream without waiting. `ended`, not this method, reports a lost connection."""
        ...

    def send_rows(self, message: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        """Send the feature rows of a prompt in one or more messages, without waiting for the draft service.

        Args:
            message: Names the session and the position of the first row.
            rows: ``[rows, feature_size]``, on the target's device or the host. The caller must not change the
                rows afterwards.
        """
        ...

    def ping(self, message: draft_pb2.SessionRequest) -> None:
        """Send a ping. Call on one of the link's threads."""
        ...

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        """Return the next reply, or None after a timeout or the end of the connection. Engine thread only."""
        ...

    def close(self) -> None:
        """End both streams. May be called from any thread and more than once."""
        ...

    def release(self) -> None:
        """Free all resources. Call on the link's thread, after `close` and after all sends."""
        ...
