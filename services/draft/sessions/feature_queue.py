"""Feature rows of one sequence on their way from the target to the head: deduplicated, in order, complete."""

from __future__ import annotations

import torch

MAX_ROWS_AHEAD = 4096
MAX_EARLY_ROWS = 16 * 1024
EARLY_LIFE_S = 5.0

EarlyKey = tuple[int, int, int]
"""Peer, session, epoch."""


class FeatureQueue:
    """Rows that arrived and are not consumed yet.

    Lengths: ``0 <= consumed <= contiguous``; rows ``[consumed, contiguous)`` are held in order, rows beyond a gap are kept apart until
    the gap closes (a commit overtakes the bulk stream) and are bounded in number.
    """

    __slots__ = ("_ahead", "_segments", "consumed", "contiguous")

    def __init__(self, consumed: int = 0) -> None:
        self.consumed = consumed
        self.contiguous = consumed
        self._segments: list[torch.Tensor] = []
        self._ahead: dict[int, torch.Tensor] = {}

    @property
    def available(self) -> int:
        """Rows that can be taken now."""
        return self.contiguous - self.consumed

    @property
    def rows_ahead(self) -> int:
        """Rows that wait behind a gap."""
        return sum(rows.shape[0] for rows in self._ahead.values())

    def add(self, base: int, rows: torch.Tensor) -> bool:
        """Take in the rows of positions ``[base, base + n)``; what is known already is ignored.

        Returns:
            False when they lie behind a gap and too many do: the caller must give the sequence up.
        """
        if base > self.contiguous:
            known = self._ahead.get(base)
            if known is None or known.shape[0] < rows.shape[0]:
                self._ahead[base] = rows
            return self.rows_ahead <= MAX_ROWS_AHEAD
        self._append(base, rows)
        while self._ahead:
            first = min(self._ahead)
            if first > self.contiguous:
                break
            self._append(first, self._ahead.pop(first))
        return True

    def take(self, n: int) -> torch.Tensor:
        """Remove and return the next `n` rows, ``[n, feature_size]``; 1 <= n <= available."""
        assert 1 <= n <= self.available, f"{n} rows wanted, {self.available} available"
        taken: list[torch.Tensor] = []
        missing = n
        while missing:
            segment = self._segments[0]
            taken.append(segment[:missing])
            if segment.shape[0] > missing:
                self._segments[0] = segment[missing:]
            else:
                del self._segments[0]
            missing -= taken[-1].shape[0]
        self.consumed += n
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _append(self, base: int, rows: torch.Tensor) -> None:
        fresh = rows[self.contiguous - base :]
        if fresh.shape[0]:
            self._segments.append(fresh)
            self.contiguous += fresh.shape[0]


class EarlyRows:
    """Rows of sessions that are not open yet: the bulk stream may overtake the Open. Bounded in number and in time."""

    __slots__ = ("_kept", "_num_rows")

    def __init__(self) -> None:
        self._kept: dict[EarlyKey, tuple[float, list[tuple[int, torch.Tensor]]]] = {}
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def keep(self, peer: int, session_id: int, epoch: int, base: int, rows: torch.Tensor, now: float) -> None:
        """Keep the rows of positions ``[base, base + n)``; the oldest go when there are too many."""
        _, chunks = self._kept.setdefault((peer, session_id, epoch), (now, []))
        chunks.append((base, rows))
        self._num_rows += rows.shape[0]
        while self._num_rows > MAX_EARLY_ROWS:
            self._drop(next(iter(self._kept)))

    def take(self, peer: int, session_id: int, epoch: int) -> list[tuple[int, torch.Tensor]]:
        """Remove and return ``(base, rows)`` in order of arrival."""
        return self._drop((peer, session_id, epoch))

    def drop_peer(self, peer: int) -> None:
        """Forget what a peer sent."""
        for key in [key for key in self._kept if key[0] == peer]:
            self._drop(key)

    def expire(self, now: float) -> None:
        """Forget rows whose Open never came."""
        for key in [key for key, (kept_s, _) in self._kept.items() if now - kept_s >= EARLY_LIFE_S]:
            self._drop(key)

    def _drop(self, key: EarlyKey) -> list[tuple[int, torch.Tensor]]:
        _, chunks = self._kept.pop(key, (0.0, []))
        self._num_rows -= sum(rows.shape[0] for _, rows in chunks)
        return chunks
