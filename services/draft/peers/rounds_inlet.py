"""The seam between a draft's rounds for targets elsewhere and what carries their states and trees."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.draft.v1 import draft_pb2


class RoundsInlet(Protocol):
    """How states come and trees go. `broken`: a state did not come; the target is gone, or stopped."""

    @property
    def broken(self) -> bool:
        """See above."""
        ...

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        """Whether the round is enqueued before its state has come, or by the message that brings it.

        Args:
            message: Of the round.
            tried: This very round has run before: enqueuing it does not make the host wait for the device.
        """
        ...

    def take(
        self, message: draft_pb2.RoundsNext, blob: torch.Tensor, expected: torch.Tensor, limit_s: float
    ) -> None:
        """Have the state of a round come into ``blob [n] uint8``, in stream order; ``expected [1] int32`` becomes its number."""
        ...

    def give(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        """Hand the trees of a round over, ``blob [n] uint8``, in stream order."""
        ...

    def skip(self, rounds: int, number: int) -> None:
        """Say that no trees come for a round, in stream order."""
        ...

    def mend(self) -> bool:
        """Start over after `broken`; False while what was ended is not over yet."""
        ...

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """Whether blobs of these sizes can travel."""
        ...
