"""The seam between rounds on the device and what carries their states and trees to and from a draft elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.spec.resident import RoundState


class RoundsChannel(Protocol):
    """How a carrier takes states to the draft and brings trees. For the engine thread, but for `close`.

    Attributes:
        broken: The trees of a round did not come in time, since `mend`, or the draft is gone.
    """

    @property
    def broken(self) -> bool:
        """See above."""
        ...

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """Whether blobs of these sizes can travel."""
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
        """Send the message and the state, and have the trees come, in stream order.

        Args:
            message: Of the round.
            state: Packed, the header to be set to the round's number.
            trees: ``[n] uint8``, where they come to with their header.
            expected: ``[1] int32``, to be set to the number.
            limit_s: How long after the state is there they may take.
            ahead: See `ExchangedBatch.exchange`.
        """
        ...

    def hand_over(self) -> None:
        """See `ExchangedBatch.hand_over`."""
        ...

    def carry(self, wanted: bool) -> None:
        """See `ExchangedBatch.carry`."""
        ...

    def mend(self) -> bool:
        """Start over after `broken`; False while that cannot be."""
        ...

    def close(self) -> None:
        """End every wait, now and from now on. Any thread."""
        ...
