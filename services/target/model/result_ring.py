"""Pinned host memory in which rounds leave their results for the host, in several buffers used in turn."""

from __future__ import annotations

import torch

from outrider.kernels.post_round import post_round

RESULTS_KEPT = 8
"""Number of buffers.

Two rounds may be in flight. A recording between two rounds runs two more rounds. There may be two recordings
between two rounds, because a round can record its own graph right after another graph was recorded.
"""


class ResultRing:
    """Ring of buffers in host memory for the results of rounds. All results have the same number of rows.

    Args:
        rows: Number of rows of a result.
        columns: Number of columns of a result.
        device: Device of the rounds.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            size = (RESULTS_KEPT, rows, columns)
            self._ring = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._next = 0

    def post(self, packed: torch.Tensor) -> None:
        """Write a round's result to the next buffer. This write is part of the round and may be recorded."""
        post_round(packed, self._ring, self._turn)

    def take(self) -> torch.Tensor:
        """Return the buffer to which the latest enqueued round writes."""
        place, self._next = self._next, (self._next + 1) % RESULTS_KEPT
        return self._ring[place]

    def recorded(self) -> None:
        """Skip the buffers that the trial runs of a recording have used. Wait for the device."""
        self._next = int(self._turn)
