"""States and trees of rounds on the device as parts of messages: for targets that share no memory with this draft."""

from __future__ import annotations

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.loop import Peer
from outrider.services.draft.replies import RoundTrees
from outrider.shared.rpc.options import INTERNAL_MESSAGE_LIMIT
from outrider.shared.rpc.staging import Staging

OTHER_FIELDS_BYTES = 1024 * 1024


class InlineRounds:
    """`RoundsInlet` through messages. The host waits for the trees of each round and sends them at once."""

    broken = False
    comes_later = True

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._staging = Staging()
        self._state = b""

    def arrived(self, state: bytes) -> None:
        """Keep the state of the round that is about to start."""
        self._state = state

    def take(self, message: draft_pb2.RoundsNext, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """See `RoundsInlet.take`: it has arrived."""
        self._staging.load(self._state, message.number, blob)
        expected.fill_(message.number)

    def give(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        """See `RoundsInlet.give`."""
        trees = self._staging.fetch(blob)
        self._staging.settle(blob)
        self._peer.send(RoundTrees(message.rounds, message.number, trees.numpy().tobytes()))

    def skip(self, rounds: int, number: int) -> None:
        """See `RoundsInlet.skip`."""
        self._peer.send(RoundTrees(rounds, number, b""))

    def mend(self) -> bool:
        """See `RoundsInlet.mend`."""
        return True

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """See `RoundsInlet.fits`."""
        return max(state.nbytes, trees.nbytes) + OTHER_FIELDS_BYTES <= INTERNAL_MESSAGE_LIMIT
