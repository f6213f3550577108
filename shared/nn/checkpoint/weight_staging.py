"""Copies weights to a GPU through pinned memory: the host fills one buffer while the GPU reads another."""

from __future__ import annotations

import torch

BUFFERS = 3
BUFFER_BYTES = 32 << 20


class WeightStaging:
    """Pinned host buffers through which tensors are copied from host memory to a GPU.

    `copy` returns before the GPU has the data. Copies run on the current stream, in the order of the calls.

    Args:
        device: Device to copy to. For a CPU, the buffers are not pinned and copies are synchronous.
        buffer_bytes: Size of each buffer.

    Raises:
        RuntimeError: The host has no pinned memory available.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            self._buffers = [
                torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(BUFFERS)
            ]
        self._fetched: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a host tensor to the contiguous tensor ``out`` of the same shape.

        If the types differ, the device converts the data.
        """
        to, flat = out.view(-1), source.reshape(-1)
        count = self._buffers[0].numel() // max(1, source.dtype.itemsize)
        for start in range(0, flat.numel(), count):
            piece = flat[start : start + count]
            self._copy(to[start : start + count], piece)

    def close(self) -> None:
        """Wait until the GPU has read every buffer."""
        for event in self._fetched:
            if event is not None:
                event.synchronize()

    def _copy(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        index = self._next
        self._next = (index + 1) % BUFFERS
        fetched = self._fetched[index]
        if fetched is not None:  # the GPU may still be reading this buffer
            fetched.synchronize()
        buffer = self._buffers[index][: piece.nbytes].view(piece.dtype)
        buffer.copy_(piece)
        out.copy_(buffer, non_blocking=self._on_gpu)
        if self._on_gpu:
            fetched = fetched or torch.cuda.Event()  # type: ignore[no-untyped-call]
            fetched.record(torch.cuda.current_stream(out.device))
            self._fetched[index] = fetched


def make_staging(device: torch.device) -> WeightStaging | None:
    """Return buffers for copies to a GPU. Return None if there is no pinned memory."""
    try:
        return WeightStaging(device)
    except RuntimeError:
        return None
