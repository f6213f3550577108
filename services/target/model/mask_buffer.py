"""The tokens that may be chosen after each row of a round, at a fixed address, for recorded graphs."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch

from outrider.services.target.grammar.matcher import Mask


class MaskBuffer:
    """Masks of allowed tokens for the packed rows of one round. Engine thread only.

    All tokens are allowed in rows that the host has not restricted. For each round, call `clear`, then `rows`
    for each entry whose output is constrained, then `upload`. Only rows whose masks have changed are copied.

    All rounds share the host's copy of the masks. Call `clear` only after the host has read the previous
    round with masks.

    Args:
        rows: Largest number of packed rows of a round.
        words: Number of 32-bit words of the mask of one row.
        device: Device of the rounds.
    """

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._host = torch.full((rows, words), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._device = self._host.to(device)  # the same tensor on a CPU
        self._array: Mask = self._host.numpy()
        # Ranges of rows that the last round has restricted, and those of this round.
        self._earlier: Seq[tuple[int, int]] = ()
        self._restricted: list[tuple[int, int]] = []

    def on_device(self, rows: int) -> torch.Tensor:
        """Return the masks of the first rows, ``[rows, words] int32``, for `kernels/token_masks`."""
        return self._device[:rows]

    def clear(self) -> None:
        """Allow all tokens in all rows."""
        for start, stop in self._restricted:
            self._array[start:stop] = -1
        self._earlier, self._restricted = tuple(self._restricted), []

    def rows(self, start: int, stop: int) -> Mask:
        """Return the host's masks of rows ``[start, stop)``, ``[stop - start, words] int32``, to fill."""
        self._restricted.append((start, stop))
        return self._array[start:stop]

    def upload(self) -> None:
        """Enqueue the copy to the device."""
        if self._device is self._host:
            return
        for start, stop in _merged([*self._earlier, *self._restricted]):
            self._device[start:stop].copy_(self._host[start:stop], non_blocking=True)


def _merged(ranges: Seq[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the union of ranges as ranges that do not touch each other."""
    first, last = -1, -1
    for start, stop in sorted(ranges):
        if start > last:
            if last > first:
                yield first, last
            first = start
        last = max(last, stop)
    if last > first:
        yield first, last
