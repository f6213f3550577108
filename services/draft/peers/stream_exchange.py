"""Transfers states and trees of rounds as messages, for targets that share no memory with the draft (gRPC).

A blob is the packed state or the packed trees of one round. If the CUDA graphs of a round have run before,
the round is enqueued when the message RoundsNext arrives. It then waits on the device for its state. Any
other round is launched when its state arrives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.peers.exchange import Exchange
from outrider.services.draft.peers.peer import Peer
from outrider.services.draft.peers.replies import StateTaken, TreesReply
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.blob_staging import BlobStaging
from outrider.shared.rpc.envelopes import Blob, BlobEnvelopes
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.options import INTERNAL_MESSAGE_LIMIT
from outrider.shared.rpc.relay import LEAST_STATE_BYTES, StreamRelay
from outrider.shared.spec.resident import StateBlob, StateLayout

OTHER_FIELDS_BYTES = 1024 * 1024
"""Number of bytes allowed for the other fields of a message that contains a blob."""
MAX_NUMBER = (1 << 31) - 1

log = get_logger("outrider.draft")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A round that is enqueued, with the size of its trees and the layout of a compact state."""

    series: int
    number: int
    num_bytes: int
    envelopes: BlobEnvelopes
    layout: StateLayout | None


class StreamExchange(Exchange):
    """An `Exchange` that receives states and sends trees as messages on a session stream.

    The host waits until the trees of each round are computed, and then sends them.

    Threads:

    - `finish_sealed`, `state_arrived`, `state_coming` and `keep_state` are called on the thread that
      receives messages.
    - `close` may be called on any thread.
    - The other methods are called on the thread that runs rounds.

    The thread that finishes a round blocks until the device has computed the round's trees. This wait lasts
    for one round of drafting, because the device already has the state.

    Args:
        peer: The session stream.
        relay: Transfers blobs between the connection and the device's stream. None if no relay is
            available. Every round is then launched when its state arrives.
        ahead: Whether rounds may be enqueued before their states arrive.
        compact: Whether the target sends compact states.
    """

    def __init__(
        self, peer: Peer, relay: StreamRelay | None = None, *, ahead: bool = True, compact: bool = False
    ) -> None:
        self._peer = peer
        self._compact = compact
        self._relay = relay
        self._may_go_ahead = ahead
        self._staging = BlobStaging()
        self._state = b""
        self._layout: StateLayout | None = None
        # Whether blobs of the current round's size fit the relay; whether the current round uses the relay;
        # whether the current round was enqueued ahead of its state.
        self._fits_relay = False
        self._relayed = False
        self._ahead = False
        # The number of the last round whose state the device waits or has waited for, and whether that state
        # is still missing.
        self._taken = 0
        self._awaited = False
        self._waiting: _Waiting | None = None
        # Whether the awaited state was announced (RoundSoon), and the rounds whose trees must wait until
        # RoundTaken has been sent.
        self._announced = False
        self._owed: deque[_Waiting] = deque()

    @property
    def broken(self) -> bool:
        return self._relay is not None and self._relay.broken

    def finish_sealed(self, message: bytes) -> bool:
        """Pass a state that is still encoded to the round that waits for it, and send the round's trees.

        Args:
            message: The encoded message from the target.

        Returns:
            False if the message is not the awaited state.

        Raises:
            ProtocolError: The state does not have the size that the round needs.
        """
        waiting, relay = self._waiting, self._relay
        if waiting is None or relay is None:
            return False
        state = waiting.envelopes.state.open(message)
        if state is None:
            return False
        self._put(relay, waiting.number, state, waiting.layout)
        self._waiting = None
        if self._announced:
            self._owed.append(waiting)
            self._peer.send(StateTaken(lambda: self._answer_owed(relay)))
        else:
            self._answer(relay, waiting)
        return True

    def state_arrived(self, message: draft_pb2.RoundState) -> bool:
        waiting, relay = self._waiting, self._relay
        if waiting is None or relay is None:
            return False
        if (waiting.series, waiting.number) != (message.rounds, message.number):
            self._release()
            return False
        self._put(relay, message.number, message.state, waiting.layout)
        self._waiting = None
        self._answer(relay, waiting)
        return True

    def state_coming(self) -> None:
        # RoundTaken is sent when the state arrives.
        relay = self._relay
        if self._waiting is not None and relay is not None:
            self._announced = True
            relay.call()

    def keep_state(self, state: bytes) -> None:
        self._state = state

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        # The device can wait only for ascending round numbers.
        self._relayed = self._fits_relay and self._taken < message.number <= MAX_NUMBER
        self._ahead = tried and self._relayed and self._may_go_ahead
        return self._ahead

    def receive_state(
        self, message: draft_pb2.RoundsNext, state: StateBlob, expected: torch.Tensor, limit_s: float
    ) -> None:
        """Copy the state that has arrived, or make the stream wait for it."""
        blob, layout = state.packed, state.layout if self._compact else None
        self._layout = layout
        if self._relayed and self._relay is not None:
            self._answer_owed(self._relay)  # first: the stream is about to wait for another round's state
            self._taken, self._awaited = message.number, True
            try:
                self._relay.take(message.number, blob, expected, limit_s)
            except CudaError as error:
                log.warning("rounds are launched when their messages arrive", reason=error.message)
                self._relay.close()
                self._relay, self._fits_relay = None, False
                raise
            if not self._ahead:
                self._put(self._relay, message.number, self._state, layout)
            return
        expand = None if layout is None else layout.expand
        self._staging.load(self._state, message.number, blob, LEAST_STATE_BYTES, expand)
        expected.fill_(message.number)

    def send_trees(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        if self._relayed and self._relay is not None:
            self._relay.give(message.number, blob)
            envelopes = BlobEnvelopes.of(message)
            waiting = _Waiting(message.rounds, message.number, blob.nbytes, envelopes, self._layout)
            if self._ahead:
                self._waiting, self._announced = waiting, False
            else:
                self._waiting = None
                self._answer(self._relay, waiting)
            return
        trees = self._staging.fetch(blob)
        self._staging.settle(blob)
        self._peer.send(TreesReply(message.rounds, message.number, trees.numpy().tobytes()))

    def skip(self, series: int, number: int) -> None:
        self._release()
        self._peer.send(TreesReply(series, number, b""))

    def mend(self) -> bool:
        return self._relay is None or (self._relay.mend() and not self._relay.broken)

    def close(self) -> None:
        """End the device's wait, because the target has gone."""
        if self._relay is not None:
            self._relay.close()

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        self._fits_relay = self._relay is not None and self._relay.fits(state, trees)
        return max(state.nbytes, trees.nbytes) + OTHER_FIELDS_BYTES <= INTERNAL_MESSAGE_LIMIT

    def _put(self, relay: StreamRelay, number: int, state: Blob, layout: StateLayout | None) -> None:
        """Pass a state to the stream that waits for it."""
        try:
            relay.put(number, state, None if layout is None else layout.expand)
        except ProtocolError:
            self._release()
            raise
        self._awaited = False

    def _answer(self, relay: StreamRelay, waiting: _Waiting) -> None:
        """Wait for the trees of an enqueued round, and send them."""
        trees = relay.settle(waiting.number, waiting.num_bytes).tobytes()
        self._peer.send(TreesReply(waiting.series, waiting.number, trees, waiting.envelopes.trees))

    def _answer_owed(self, relay: StreamRelay) -> None:
        """Send the trees of a round whose state was announced, unless they were already sent.

        Any thread that may wait for the device may call this method.
        """
        try:
            waiting = self._owed.popleft()
        except IndexError:
            return
        self._answer(relay, waiting)

    def _release(self) -> None:
        """Let the device continue without the state that it waits for."""
        self._waiting = None
        if self._awaited and self._relay is not None:
            self._awaited = False
            self._relay.release(self._taken)
