"""Reads weight files ahead of the one thread that loads them: several parts at a time, of one shard or of several.

A mapped file is read when its memory is first touched, a page at a time. Threads that touch the tensors in the order in which they will be
taken keep disk and page cache busy, and the copies to the device find their pages there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import torch

THREADS = 8
PIECE_BYTES = 32 << 20
AHEAD_BYTES = 4 << 30
"""How far the threads may be ahead: what was read too early may be gone from the page cache again."""
PAGE_BYTES = 4096


class ReadAhead:
    """Threads that touch tensors before they are used.

    Args:
        tensors: Host tensors that share files' memory, in the order in which they will be used.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._changed = threading.Condition()
        self._used = 0
        self._closed = False
        self._pieces: deque[tuple[int, torch.Tensor]] = deque()  # (bytes before it, its bytes)
        position = 0
        for tensor in tensors:
            for piece in torch.split(tensor.reshape(-1).view(torch.uint8), PIECE_BYTES):
                self._pieces.append((position, piece))
                position += piece.numel()
        count = min(THREADS, len(self._pieces))
        self._threads = [
            threading.Thread(target=self._run, name=f"read-ahead-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def used(self, nbytes: int) -> None:
        """Tell that so many further bytes were used."""
        with self._changed:
            self._used += nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, which hold the files' memory."""
        with self._changed:
            self._closed = True
            self._pieces.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            piece[::PAGE_BYTES].sum()  # without Python's lock

    def _next(self) -> torch.Tensor | None:
        """Return the next piece as soon as it is near enough to what is used; None when there is none."""
        with self._changed:
            while not self._closed and self._pieces:
                if self._pieces[0][0] <= self._used + AHEAD_BYTES:
                    return self._pieces.popleft()[1]
                self._changed.wait()
        return None
