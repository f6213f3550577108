"""A fake `StreamRelay` that needs no GPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.envelopes import Expand
from outrider.shared.rpc.ipc.cuda import CudaError

SIZE = 512
"""Size of the trees and of a draft's states, in bytes."""


class Relay:
    """Records the messages that a GPU stream would receive, and the rounds that it would await (`waits`)."""

    def __init__(self) -> None:
        self.broken = False
        self.closed = False
        self.fails = False
        self.room = 1 << 20
        self.waits: set[int] = set()
        self.blobs: dict[int, bytes] = {}
        self.came: dict[int, bytes] = {}
        self.calls = 0

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return state.nbytes <= self.room

    def give(self, number: int, blob: torch.Tensor) -> None:
        self.blobs[number] = bytes(blob.numpy())

    def take(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        if self.fails:
            raise CudaError("the driver does not support this")
        self.waits.add(number)

    def call(self) -> None:
        self.calls += 1

    def given(self, number: int) -> bool:
        return number in self.blobs

    def settle(self, number: int, num_bytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.blobs[number][:num_bytes], dtype=np.uint8)

    def put(self, number: int, data: bytes, expand: Expand | None = None) -> None:
        if expand is not None:
            block = bytearray(SIZE)
            expand(data, memoryview(block))
            data = bytes(block)
        if len(data) != SIZE:
            raise ProtocolError("the trees have the wrong size", field="rounds")
        self.came[number] = data
        self.waits.remove(number)

    def release(self, number: int) -> None:
        self.waits.discard(number)

    def mend(self) -> bool:
        return not self.waits

    def close(self) -> None:
        self.closed = self.broken = True
        self.waits.clear()
