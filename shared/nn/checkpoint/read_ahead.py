"""Reads weight files into the page cache with several threads, ahead of the thread that loads the weights.

A page of a mapped file is read from disk when a program first touches the page. These threads touch the pages
of all tensors in the order in which the tensors are used. The disk therefore stays busy. The loading thread
finds the pages in the page cache.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import torch

THREADS = 8
PIECE_BYTES = 32 << 20
AHEAD_BYTES = 4 << 30
"""Number of bytes that the threads may be ahead. Pages that are read too early may be evicted before use."""
PAGE_BYTES = 4096


class ReadAhead:
    """Background threads that read mapped tensors into the page cache before the tensors are used.

    Args:
        tensors: Host tensors that map files, in the order in which they will be used.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._changed = threading.Condition()
        self._used = 0
        self._closed = False
        # Each entry is a piece of a tensor, preceded by the number of bytes in all earlier pieces.
        self._pieces: deque[tuple[int, torch.Tensor]] = deque()
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
        """Report that `nbytes` further bytes have been used."""
        with self._changed:
            self._used += nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads. Until then, the threads keep the files mapped."""
        with self._changed:
            self._closed = True
            self._pieces.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            piece[::PAGE_BYTES].sum()  # touches every page, without the GIL

    def _next(self) -> torch.Tensor | None:
        """Wait until the next piece is at most `AHEAD_BYTES` ahead, and return it. Return None at the end."""
        with self._changed:
            while not self._closed and self._pieces:
                if self._pieces[0][0] <= self._used + AHEAD_BYTES:
                    return self._pieces.popleft()[1]
                self._changed.wait()
        return None
