"""The interface through which rounds for remote targets receive their states and send their trees.

It is implemented by messages (`inline_rounds`) and by a mailbox on one host (`serving.ipc`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.draft.v1 import draft_pb2


class RoundsInlet(Protocol):
    """Receives the states of rounds and sends their trees."""

    @property
    def broken(self) -> bool:
        """True if a state did not arrive in time: the target is gone or has stopped."""
        ...

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        """Return whether the round is enqueued before its state arrives, instead of on the state's arrival.

        Args:
            message: The message that announces the round.
            tried: True if this very round has run before, so that enqueuing it cannot block the host.
        """
        ...

    def take(
        self, message: draft_pb2.RoundsNext, blob: torch.Tensor, expected: torch.Tensor, limit_s: float
    ) -> None:
        """Receive a round's state into ``blob [n] uint8``, in stream order.

        ``expected [1] int32`` is set to the round's number.

        Args:
            message: The message that announces the round.
            blob: Memory of the state.
            expected: Number of the round, on the device.
            limit_s: Limit of the device's wait for the state.
        """
        ...

    def give(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        """Send the trees of a round, ``blob [n] uint8``, in stream order."""
        ...

    def skip(self, rounds: int, number: int) -> None:
        """Report, in stream order, that a round returns no trees."""
        ...

    def mend(self) -> bool:
        """Start over after `broken`; return False while the old rounds have not ended yet."""
        ...

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """True if blobs of these sizes can be transferred."""
        ...
