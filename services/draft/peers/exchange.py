"""The interface through which the draft receives states from remote targets and sends trees to them.

A state contains the tokens that the target's last pass chose, and their features. `stream_exchange`
implements the interface with messages. For targets on the same host, `serving.ipc` implements it with a
mailbox in shared memory.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.spec.resident import StateBlob


class Exchange(Protocol):
    """Receives the states of rounds and sends their trees."""

    @property
    def broken(self) -> bool:
        """True if a state did not arrive in time, i.e. if the target must be gone or must have stopped."""
        ...

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        """Decide whether to enqueue a round before its state arrives (True) or when it arrives (False).

        Args:
            message: The message RoundsNext, which announces the round.
            tried: True if a round that uses the same recorded graphs has run before. In this case, enqueuing
                the round cannot block the host.
        """
        ...

    def receive_state(
        self, message: draft_pb2.RoundsNext, state: StateBlob, expected: torch.Tensor, limit_s: float
    ) -> None:
        """Receive the round state of a target into the round's memory, in stream order.

        This call sets `expected` to the round's number.

        Args:
            message: The message RoundsNext, which announces the round.
            state: Memory of the round state.
            expected: ``[1] int32``, the number of the round, on the device.
            limit_s: Longest time that the device waits for the state, in seconds.
        """
        ...

    def send_trees(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        """Send the trees of a round, ``blob [n] uint8``, in stream order."""
        ...

    def skip(self, series: int, number: int) -> None:
        """Report, in stream order, that a round returns no trees."""
        ...

    def state_coming(self) -> None:
        """Prepare for the state that a round waits for, if there is one.

        Raises:
            ProtocolError: This exchange receives states without messages.
        """
        ...

    def state_arrived(self, message: draft_pb2.RoundState) -> bool:
        """Pass a round state from the target to the round that waits for it, and send the round's trees.

        Returns:
            False if no round waits for the state.

        Raises:
            ProtocolError: The state does not have the size that the round needs, or this exchange receives
                states without messages.
        """
        ...

    def keep_state(self, state: bytes) -> None:
        """Keep this state for the round that starts next. Called after `state_arrived` has returned False."""
        ...

    def mend(self) -> bool:
        """Start over after `broken`; return False while the old rounds have not ended yet."""
        ...

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """True if blobs of these sizes can be transferred."""
        ...
