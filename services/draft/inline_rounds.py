"""States and trees of rounds on the device as parts of messages: for targets that share no memory with this draft.

A round that has run before is enqueued by RoundsNext and waits on the device for its state; others are launched when their state comes.
"""

from __future__ import annotations

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.loop import Peer
from outrider.services.draft.replies import RoundTrees
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.options import INTERNAL_MESSAGE_LIMIT
from outrider.shared.rpc.relay import StreamRelay
from outrider.shared.rpc.staging import Staging

OTHER_FIELDS_BYTES = 1024 * 1024
MAX_NUMBER = (1 << 31) - 1


class InlineRounds:
    """`RoundsInlet` through messages. The host waits for the trees of each round and sends them at once.

    `finish` and `arrived` are for the thread that takes in messages, `close` for any, the rest for the one that runs rounds.

    Args:
        peer: Whose rounds these are.
        relay: Of its connection; None where nothing is enqueued ahead.
    """

    def __init__(self, peer: Peer, relay: StreamRelay | None = None) -> None:
        self._peer = peer
        self._relay = relay
        self._relays = False
        self._staging = Staging()
        self._state = b""
        self._ahead = False
        # The last round whose state the device was told to wait for, and whether that has not come.
        self._taken = 0
        self._awaited = False
        # The round that is enqueued behind that, and the bytes of its trees.
        self._waiting: tuple[draft_pb2.RoundsNext, int] | None = None

    @property
    def broken(self) -> bool:
        """See `RoundsInlet.broken`."""
        return self._relay is not None and self._relay.broken

    def finish(self, message: draft_pb2.RoundState) -> bool:
        """Hand a state to the round that waits for it, and send its trees; False if none does.

        Raises:
            ProtocolError: It is no state of that round.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None or self._relay is None:
            return False
        following, num_bytes = waiting
        if (following.rounds, following.number) != (message.rounds, message.number):
            self._release()
            return False
        try:
            self._relay.put(message.number, message.state)
        except ProtocolError:
            self._release()
            raise
        self._awaited = False
        self._peer.send(RoundTrees(message.rounds, message.number, self._relay.settle(message.number, num_bytes).tobytes()))
        return True

    def arrived(self, state: bytes) -> None:
        """Keep the state of the round that is about to start."""
        self._state = state

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        """See `RoundsInlet.goes_ahead`; numbers that do not ascend would not be waited for."""
        self._ahead = tried and self._relays and self._taken < message.number <= MAX_NUMBER
        return self._ahead

    def take(self, message: draft_pb2.RoundsNext, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """See `RoundsInlet.take`: it has arrived, or the stream waits for it."""
        if self._ahead and self._relay is not None:
            self._taken, self._awaited = message.number, True
            self._relay.take(message.number, blob, expected, limit_s)
            return
        self._staging.load(self._state, message.number, blob)
        expected.fill_(message.number)

    def give(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        """See `RoundsInlet.give`."""
        if self._ahead and self._relay is not None:
            self._relay.give(message.number, blob)
            self._waiting = message, blob.nbytes
            return
        trees = self._staging.fetch(blob)
        self._staging.settle(blob)
        self._peer.send(RoundTrees(message.rounds, message.number, trees.numpy().tobytes()))

    def skip(self, rounds: int, number: int) -> None:
        """See `RoundsInlet.skip`."""
        self._release()
        self._peer.send(RoundTrees(rounds, number, b""))

    def mend(self) -> bool:
        """See `RoundsInlet.mend`."""
        return self._relay is None or (self._relay.mend() and not self._relay.broken)

    def close(self) -> None:
        """The target has gone: end what the device waits for."""
        if self._relay is not None:
            self._relay.close()

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """See `RoundsInlet.fits`."""
        self._relays = self._relay is not None and self._relay.fits(state, trees)
        return max(state.nbytes, trees.nbytes) + OTHER_FIELDS_BYTES <= INTERNAL_MESSAGE_LIMIT

    def _release(self) -> None:
        """Have the device go on without the state that it waits for."""
        self._waiting = None
        if self._awaited and self._relay is not None:
            self._awaited = False
            self._relay.release(self._taken)
