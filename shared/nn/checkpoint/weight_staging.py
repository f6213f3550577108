"""Copies of weights to a GPU by way of pinned memory: a file's pages are copied into one buffer while the GPU fetches another."""

from __future__ import annotations

import torch

BUFFERS = 3
BUFFER_BYTES = 32 << 20


class WeightStaging:
    """Pinned buffers that host tensors go through; copies return before the GPU has them, in the order of the current stream.

    Args:
        device: Where to; on a CPU the buffers are not pinned and nothing runs ahead.
        buffer_bytes: Of each.

    Raises:
        RuntimeError: The host gives no pinned memory.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # written in any mode
            self._buffers = [
                torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(BUFFERS)
            ]
        self._fetched: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a host tensor to ``out``, contiguous and of its shape; a type that differs is converted on the device."""
        to, flat = out.view(-1), source.reshape(-1)
        count = self._buffers[0].numel() // max(1, source.dtype.itemsize)
        for start in range(0, flat.numel(), count):
            piece = flat[start : start + count]
            self._copy(to[start : start + count], piece)

    def close(self) -> None:
        """Wait until the GPU has fetched everything."""
        for event in self._fetched:
            if event is not None:
                event.synchronize()

    def _copy(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        index = self._next
        self._next = (index + 1) % BUFFERS
        fetched = self._fetched[index]
        if fetched is not None:
            fetched.synchronize()
        buffer = self._buffers[index][: piece.nbytes].view(piece.dtype)
        buffer.copy_(piece)
        out.copy_(buffer, non_blocking=self._on_gpu)
        if self._on_gpu:
            fetched = fetched or torch.cuda.Event()  # type: ignore[no-untyped-call]
            fetched.record(torch.cuda.current_stream(out.device))
            self._fetched[index] = fetched


def make_staging(device: torch.device) -> WeightStaging | None:
    """Return buffers for copies to a GPU, or None where the host gives none: copies then take their usual way."""
    try:
        return WeightStaging(device)
    except RuntimeError:
        return None
