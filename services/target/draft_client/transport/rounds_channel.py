"""`RoundsChannel`, the interface for rounds on the device that carries states to a draft and trees back."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.spec.resident import RoundState


class RoundsChannel(Protocol):
    """Carries states to the draft and trees back. Engine thread only, except for `close`."""

    @property
    def broken(self) -> bool:
        """True if the trees of a round were late since the last `mend`, or the draft is gone."""
        ...

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """Return True if blobs of these sizes can be carried."""
        ...

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: RoundState,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        """Send the message and the state, and receive the trees in stream order.

        Args:
            message: The round's RoundsNext.
            state: A packed state, whose header is set to the round's number.
            trees: ``[n] uint8``; receives the trees and their header.
            expected: ``[1] int32``; set to the round's number.
            limit_s: Longest wait for the trees after the state is complete.
            ahead: See `ExchangedBatch.exchange`.
        """
        ...

    def hand_over(self) -> None:
        """Do the host's part of sending the state, if any. See `ExchangedBatch.hand_over`."""
        ...

    def carry(self, wanted: bool) -> None:
        """Do the host's part of receiving the trees, if any. See `ExchangedBatch.carry`."""
        ...

    def mend(self) -> bool:
        """Recover after `broken`. Return False if that is not possible now."""
        ...

    def close(self) -> None:
        """End every current and future wait. Any thread."""
        ...
