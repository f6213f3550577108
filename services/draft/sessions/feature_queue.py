"""Queues feature rows from the target: removes duplicates, restores order, and holds rows behind a gap.

A feature row contains the target's captured hidden states at one position."""

from __future__ import annotations

import torch

MAX_ROWS_AHEAD = 4096
MAX_EARLY_ROWS = 16 * 1024
EARLY_LIFE_S = 5.0

EarlyKey = tuple[int, int, int]
"""Key of early rows: peer, session id and epoch."""


class FeatureQueue:
    """Feature rows of one sequence that the draft has received but not consumed yet.

    ``0 <= consumed <= contiguous`` always holds. Rows ``[consumed, contiguous)`` are stored in order. A gap
    occurs if the rows of a commit overtake the prompt's rows, which the target sends on another stream. A
    limited number of rows beyond a gap is stored separately until the gap closes.
    """

    __slots__ = ("_ahead", "_segments", "consumed", "contiguous")

    def __init__(self, consumed: int = 0) -> None:
        self.consumed = consumed
        self.contiguous = consumed
        self._segments: list[torch.Tensor] = []
        self._ahead: dict[int, torch.Tensor] = {}

    @property
    def available(self) -> int:
        """Number of rows that can be taken now."""
        return self.contiguous - self.consumed

    @property
    def rows_ahead(self) -> int:
        """Number of rows that wait behind a gap."""
        return sum(rows.shape[0] for rows in self._ahead.values())

    def add(self, base: int, rows: torch.Tensor) -> bool:
        """Add the feature rows of positions ``[base, base + n)``. Rows that were added before are ignored.

        Returns:
            False if too many rows now wait behind a gap. The caller must then drop the sequence.
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
        """Remove and return the next `n` rows, ``[n, feature_size]``; requires 1 <= n <= available."""
        assert 1 <= n <= self.available, f"{n} rows requested, {self.available} available"
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
    """Feature rows of sessions that are not open yet.

    The target sends the rows of a prompt on one stream, and opens the session on another stream. The rows may
    therefore arrive first. Their number and their age are bounded.
    """

    __slots__ = ("_kept", "_num_rows")

    def __init__(self) -> None:
        self._kept: dict[EarlyKey, tuple[float, list[tuple[int, torch.Tensor]]]] = {}
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def keep(self, peer: int, session_id: int, epoch: int, base: int, rows: torch.Tensor, now: float) -> None:
        """Keep the rows of positions ``[base, base + n)``. Over the limit, drop the oldest session's rows."""
        _, chunks = self._kept.setdefault((peer, session_id, epoch), (now, []))
        chunks.append((base, rows))
        self._num_rows += rows.shape[0]
        while self._num_rows > MAX_EARLY_ROWS:
            self._drop(next(iter(self._kept)))

    def take(self, peer: int, session_id: int, epoch: int) -> list[tuple[int, torch.Tensor]]:
        """Remove and return a session's chunks ``(base, rows)``, in order of arrival."""
        return self._drop((peer, session_id, epoch))

    def drop_peer(self, peer: int) -> None:
        """Drop all rows from a peer."""
        for key in [key for key in self._kept if key[0] == peer]:
            self._drop(key)

    def expire(self, now: float) -> None:
        """Drop rows whose Open did not arrive in time."""
        for key in [key for key, (kept_s, _) in self._kept.items() if now - kept_s >= EARLY_LIFE_S]:
            self._drop(key)

    def _drop(self, key: EarlyKey) -> list[tuple[int, torch.Tensor]]:
        _, chunks = self._kept.pop(key, (0.0, []))
        self._num_rows -= sum(rows.shape[0] for _, rows in chunks)
        return chunks
