"""Copies blobs between a GPU and gRPC messages, through pinned buffers that are allocated once per size.

A blob is one block of bytes that contains a round's states or its draft trees (`shared.spec.resident`).
"""

from __future__ import annotations

import numpy as np
import torch

from outrider.shared.base.errors import wrong_size
from outrider.shared.rpc.envelopes import Blob, Expand


class BlobStaging:
    """Copies blobs, ``[n] uint8``, in stream order. Use from one thread at a time."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], torch.Tensor] = {}

    def fetch(self, blob: torch.Tensor) -> torch.Tensor:
        """Start to copy a blob from the device to the host.

        The returned tensor is complete after a call of `settle`. It stays valid until the next `fetch` of a
        blob of the same size.
        """
        place = self._place("out", blob)
        place.copy_(blob, non_blocking=True)
        return place

    @staticmethod
    def settle(blob: torch.Tensor) -> None:
        """Wait for the current stream of the blob's device. Polls, since a sleeping thread wakes up late."""
        if blob.is_cuda:
            torch.cuda.current_stream(blob.device).synchronize()

    def load(
        self,
        data: Blob,
        number: int,
        blob: torch.Tensor,
        least_bytes: int | None = None,
        expand: Expand | None = None,
    ) -> None:
        """Copy the bytes of a message to a blob, and write the round's number into the blob's header.

        Before this call, the previous copy to a blob of this size must have finished. All copies of one size
        use the same pinned buffer.

        Args:
            data: The message's bytes, which become the content of the blob.
            number: The number of the round.
            blob: The destination, on the device.
            least_bytes: Smallest accepted length of `data`. If `data` is shorter than the blob, the end of
                the blob stays unchanged. If `least_bytes` is None, `data` must be as long as the blob.
            expand: Writes `data` to its places in the blob. If None, `data` is copied to the blob's start.

        Raises:
            ProtocolError: `data` has a wrong size.
        """
        if not (least_bytes or blob.nbytes) <= len(data) <= blob.nbytes:
            raise wrong_size(len(data), blob.nbytes)
        place = self._place("in", blob)
        array = place.numpy()
        if expand is not None:
            expand(data, array.data)
        else:
            array[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        array[:4].view(np.int32)[0] = number
        blob.copy_(place, non_blocking=True)

    def _place(self, use: str, blob: torch.Tensor) -> torch.Tensor:
        key = (use, blob.nbytes)
        if key not in self._places:
            with torch.inference_mode(False):
                self._places[key] = torch.zeros(blob.nbytes, dtype=torch.uint8, pin_memory=blob.is_cuda)
        return self._places[key]
