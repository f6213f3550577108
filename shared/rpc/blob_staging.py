"""Blobs on their way between a device and messages: through memory that is pinned, once for every size."""

from __future__ import annotations

import numpy as np
import torch

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.envelopes import Blob


class BlobStaging:
    """Copies blobs, ``[n] uint8``, in stream order. For one thread at a time."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], torch.Tensor] = {}

    def fetch(self, blob: torch.Tensor) -> torch.Tensor:
        """Begin to copy a blob to the host; what is returned holds it after `settle`, until the next `fetch` of that size."""
        place = self._place("out", blob)
        place.copy_(blob, non_blocking=True)
        return place

    @staticmethod
    def settle(blob: torch.Tensor) -> None:
        """Wait until all that was enqueued on the blob's device is done; polls, as a thread that sleeps wakes late."""
        if blob.is_cuda:
            torch.cuda.current_stream(blob.device).synchronize()

    def load(self, data: Blob, number: int, blob: torch.Tensor, least_bytes: int | None = None) -> None:
        """Copy the bytes of a message to a blob, with a header of this number. What the last call of that size enqueued must be done.

        Args:
            data: The bytes.
            number: Of the round.
            blob: Where they go.
            least_bytes: What lacks behind these stays as it was; None: nothing may.

        Raises:
            ProtocolError: Their size is another.
        """
        if not (least_bytes or blob.nbytes) <= len(data) <= blob.nbytes:
            raise ProtocolError(f"A blob of {len(data)} bytes where {blob.nbytes} are due.", field="rounds")
        place = self._place("in", blob)
        array = place.numpy()
        array[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        array[:4].view(np.int32)[0] = number
        blob.copy_(place, non_blocking=True)

    def _place(self, use: str, blob: torch.Tensor) -> torch.Tensor:
        key = (use, blob.nbytes)
        if key not in self._places:
            with torch.inference_mode(False):
                self._places[key] = torch.zeros(blob.nbytes, dtype=torch.uint8, pin_memory=blob.is_cuda)
        return self._places[key]
