"""The seam between the draft client and what carries its messages."""

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
"""A draft that has borrowed its last tensor warms up before it answers: a first start on a machine compiles kernels."""


class ConnectionLost(Exception):
    """The draft is not there, or not any more."""


class Carrier(Protocol):
    """Carries the messages of one connection. The link's thread opens and follows it, the engine thread sends and receives.

    Attributes:
        ended: Set before anybody hears of the end.
        tensors: Puts the rows of a frame into its message; for the engine thread.
        rows_follow_open: What `send_rows` sends arrives behind what was sent before, so it need not wait for OpenAck.
        rows_behind: Rows that were given to `send_rows` may arrive behind what is sent now.
        rounds: For rounds that stay on the device; None where they go the host's way.
    """

    ended: threading.Event
    tensors: TensorWriter
    rows_follow_open: bool
    rounds: RoundsChannel | None

    @property
    def rows_behind(self) -> bool:
        """See above."""
        ...

    def hello(self, hello: draft_pb2.Hello) -> draft_pb2.HelloAck:
        """Connect and shake hands.

        Raises:
            ConnectionLost: nobody is there, or they went away.
            OutriderError: the draft refuses this target; says why.
        """
        ...

    def get_tensor(self, name: str) -> Iterable[common_pb2.TensorChunk]:
        """Return the chunks of one of the head's tensors; errors as for `hello`."""
        ...

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        """Send tensors that the head borrows; errors as for `hello`."""
        ...

    def open_bulk(self, target_id: str) -> None:
        """Open the bulk stream and what tensors travel in; errors as for `hello`."""
        ...

    def follow(self, on_pong: Callable[[draft_pb2.Pong], None]) -> None:
        """Stay until the connection has ended; called on the link's thread once the connection is in use."""
        ...

    def send(self, message: draft_pb2.SessionRequest) -> None:
        """Send on the session stream, without waiting; a connection that is lost ends later."""
        ...

    def send_rows(self, message: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        """Send feature rows of a prompt, in as many messages as it takes, without waiting for the draft.

        Args:
            message: Names their session, and the place of the first.
            rows: ``[rows, feature_size]``, on the target's device or the host; not to be changed afterwards.
        """
        ...

    def ping(self, message: draft_pb2.SessionRequest) -> None:
        """Ask for a sign of life; called on the link's threads."""
        ...

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        """Return the next reply; None if none comes in time or the connection has ended. For the engine thread."""
        ...

    def close(self) -> None:
        """End both streams; any thread, more than once."""
        ...

    def release(self) -> None:
        """Free what is held; on the link's thread, after `close`, when nobody sends any more."""
        ...
