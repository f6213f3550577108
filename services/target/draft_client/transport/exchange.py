"""`Exchange`, the interface that carries states to a draft and trees back for rounds on the device."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.spec.resident import StateBlob


class Exchange(Protocol):
    """Carries states to the draft, and carries trees back. Engine thread only, except for `close`."""

    @property
    def broken(self) -> bool:
        """True if trees were late since the last `mend`, or if the draft has disconnected."""
        ...

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """Return True if the channel can carry a state and trees of these sizes."""
        ...

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: StateBlob,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        """Send a round's message and state to the draft, and receive its trees, in stream order.

        Args:
            message: The RoundsNext message of the round.
            state: The round states of all groups of sequences. This method writes the round's number into
                their header.
            trees: ``[n] uint8``, which receives the trees with their header.
            expected: ``[1] int32``, which this method sets to the round's number. Trees whose header has
                another number are not used.
            limit_s: Longest wait for the trees, in seconds, counted from the time when the state is complete.
            ahead: True if the device may wait until the host has sent or received a message. See
                `TreeExchange.exchange`.
        """
        ...

    def send_state(self) -> None:
        """Do the host's work to send the state, if there is any. See `ExchangedSlots.send_state`."""
        ...

    def receive_trees(self, wanted: bool) -> None:
        """Do the host's work to receive the trees, if there is any. See `ExchangedSlots.receive_trees`."""
        ...

    def mend(self) -> bool:
        """Recover after `broken`. Return False if that is not possible now."""
        ...

    def close(self) -> None:
        """End every current and future wait. May be called from any thread."""
        ...
