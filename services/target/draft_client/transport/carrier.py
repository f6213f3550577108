"""`Carrier`, the interface between the draft client and the transports that carry its messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport.rounds_channel import RoundsChannel
from outrider.shared.rpc.tensors import TensorWriter

CONNECT_TIMEOUT_S = 0.25
HANDSHAKE_TIMEOUT_S = 60.0
LEND_TIMEOUT_S = 300.0
"""Wait for a draft that borrowed tensors: it warms up first, and compiles kernels on a new machine."""


class ConnectionLost(Exception):
    """The draft cannot be reached, or the connection to it has ended."""


class Carrier(Protocol):
    """Carries the messages of one connection.

    The link's thread opens and follows the connection. The engine thread sends and receives.

    Attributes:
        ended: Set when the connection has ended, before anything else reports it.
        tensors: Puts the feature rows of a frame into its message. Engine thread only.
        rows_follow_open: True if rows from `send_rows` cannot overtake earlier messages, so that they need
            not wait for OpenAck.
        rounds: Carries rounds that stay on the device; None if all rounds run through the host.
    """

    ended: threading.Event
    tensors: TensorWriter
    rows_follow_open: bool
    rounds: RoundsChannel | None

    @property
    def rows_behind(self) -> bool:
        """True if rows passed to `send_rows` may arrive after messages that are sent now."""
        ...

    def hello(self, hello: draft_pb2.Hello) -> draft_pb2.HelloAck:
        """Connect and shake hands.

        Raises:
            ConnectionLost: The draft cannot be reached, or the connection ended.
            OutriderError: The draft refuses this target. The message gives the reason.
        """
        ...

    def get_tensor(self, name: str) -> Iterable[common_pb2.TensorChunk]:
        """Yield the chunks of one of the draft's tensors. Raises as `hello` does."""
        ...

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        """Send tensors that the draft borrows. Raises as `hello` does."""
        ...

    def open_bulk(self, target_id: str) -> None:
        """Open the bulk stream and whatever carries tensors. Raises as `hello` does."""
        ...

    def follow(self, on_pong: Callable[[draft_pb2.Pong], None]) -> None:
        """Receive pongs until the connection has ended. Runs on the link's thread after the handshake."""
        ...

    def send(self, message: draft_pb2.SessionRequest) -> None:
        """Send on the session stream without waiting. A lost connection is noticed later."""
        ...

    def send_rows(self, message: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        """Send feature rows of a prompt in one or more messages, without waiting for the draft.

        Args:
            message: Names the session and the position of the first row.
            rows: ``[rows, feature_size]``, on the target's device or the host; must not change afterwards.
        """
        ...

    def ping(self, message: draft_pb2.SessionRequest) -> None:
        """Send a ping. Called on the link's threads."""
        ...

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        """Return the next reply; None on a timeout or if the connection has ended. Engine thread only."""
        ...

    def close(self) -> None:
        """End both streams. May be called from any thread and more than once."""
        ...

    def release(self) -> None:
        """Free all resources. Call on the link's thread, after `close` and once no thread sends."""
        ...
