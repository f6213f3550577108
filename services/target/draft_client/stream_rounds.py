"""Rounds that stay on the device, over a gRPC stream: the host waits for the state, sends it, and waits for the trees.

The message of the round goes ahead, while the device still works, so that only bytes are left to be copied when the state is there.

It waits awake (see `shared.rpc.polling`): when the pass is done its result is on its way at once, and so is the next pass when trees come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.direct import ClientStream
from outrider.shared.rpc.polling import Vigil
from outrider.shared.rpc.staging import Staging

STATE_BYTES = 512 * 1024
"""Ten sequences of 6 rows of 4096 in bf16. A state holds all rows, accepted or not: of larger batches less travels by way of the host."""

log = get_logger("outrider.target.draft")


class StreamRounds:
    """`RoundsChannel` over a stream.

    Args:
        stream: Of the session.
        vigil: Of the stream.
        dispatch: Takes in a message that the engine thread happened to receive.
    """

    def __init__(self, stream: ClientStream, vigil: Vigil, dispatch: Callable[[bytes], None]) -> None:
        self.broken = False
        self._stream = stream
        self._vigil = vigil
        self._dispatch = dispatch
        self._staging = Staging()
        self._arrived: deque[draft_pb2.RoundTrees] = deque()
        self._closed = False

    def arrived(self, trees: draft_pb2.RoundTrees) -> None:
        """Take in the trees of a round; any thread."""
        self._arrived.append(trees)

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """See `RoundsChannel.fits`."""
        return state.nbytes <= STATE_BYTES

    def exchange(
        self, message: draft_pb2.RoundsNext, state: torch.Tensor, trees: torch.Tensor, expected: torch.Tensor, limit_s: float
    ) -> None:
        """See `RoundsChannel.exchange`."""
        self._stream.send(draft_pb2.SessionRequest(rounds_next=message).SerializeToString())
        expected.fill_(message.number)
        fetched = self._staging.fetch(state).numpy()
        request = draft_pb2.SessionRequest(round_state=draft_pb2.RoundState(rounds=message.rounds, number=message.number))
        self._staging.settle(state)
        request.round_state.state = fetched.tobytes()
        self._stream.send(request.SerializeToString())
        self._vigil.expect(limit_s)
        reply = self._await(message.number, time.monotonic() + limit_s)
        self._vigil.rest()
        if reply is None:
            self.broken = True
        elif reply.trees:
            try:
                self._staging.load(reply.trees, message.number, trees)
            except ProtocolError as error:
                log.warning("the draft broke the protocol", error=error.message)
                self.broken = True

    def mend(self) -> bool:
        """See `RoundsChannel.mend`."""
        self.broken = self._closed
        self._arrived.clear()
        return not self._closed

    def close(self) -> None:
        """See `RoundsChannel.close`. Who waits hears of it when the stream is cancelled."""
        self._closed = self.broken = True

    def _await(self, number: int, until: float) -> draft_pb2.RoundTrees | None:
        """Return the trees of a round, or None if they do not come in time; late ones of earlier rounds are dropped."""
        while True:
            while self._arrived:
                reply = self._arrived.popleft()
                if reply.number == number:
                    return reply
            remaining = until - time.monotonic()
            if remaining <= 0 or self._closed:
                return None
            received = self._stream.receive_within(remaining)
            if received is None:
                if self._stream.ended:
                    return None
                continue
            try:
                self._dispatch(received)
            except ProtocolError as error:
                log.warning("the draft broke the protocol", error=error.message)
                self._stream.cancel()
                return None
