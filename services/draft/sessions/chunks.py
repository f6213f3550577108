"""Splits the new rows of sessions into chunks for one pass, and records finished passes in the sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from outrider.services.draft.sessions.session import Session
from outrider.shared.kv.pages import PageLease


@dataclass(frozen=True, slots=True)
class RowChunk:
    """New rows ``[start, start + count)`` of one session that a pass adds to the KV."""

    session: Session
    start: int
    count: int

    @property
    def stop(self) -> int:
        """The index of the last row, plus one."""
        return self.start + self.count


def take_chunks(sessions: Sequence[Session], max_rows: int, keep: int = 0) -> list[RowChunk]:
    """Distribute up to `max_rows` rows among the sessions, in order.

    The last `keep` new rows of each session are left for a later call.
    """
    chunks: list[RowChunk] = []
    for session in sessions:
        count = min(session.extendable_rows - keep, max_rows - sum(chunk.count for chunk in chunks))
        if count > 0:
            chunks.append(RowChunk(session, session.cached_rows, count))
    return chunks


def take_features(chunks: Sequence[RowChunk], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Remove the features of the chunks' rows from their queues and return them, ``[rows, feature_size]``."""
    rows = [chunk.session.features.take(chunk.count) for chunk in chunks]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(device=device, dtype=dtype)


def leases_of(chunks: Sequence[RowChunk]) -> list[PageLease]:
    """Return the lease of each chunk's session. All sessions must be reserved."""
    return [chunk.session.lease for chunk in chunks if chunk.session.lease is not None]


def finish_chunks(chunks: Sequence[RowChunk], states: Sequence[torch.Tensor | None]) -> None:
    """Mark the KV rows of prompt chunks as cached, in the sessions of the chunks.

    Args:
        chunks: The chunks of one pass.
        states: The state of each chunk's last row, ``[hidden]``; None if the state was not computed.
    """
    for chunk, state in zip(chunks, states, strict=True):
        chunk.session.cached_rows += chunk.count
        chunk.session.last_state = state


def last_states(chunks: Sequence[RowChunk], states: torch.Tensor) -> list[torch.Tensor]:
    """Return the state of each prompt chunk's last row, from ``states [rows, hidden]`` of one pass.

    The states are copied, because a view would keep the states of a whole prompt in memory.
    """
    ends = [end - 1 for end in accumulate(chunk.count for chunk in chunks)]
    return [states[end].clone() for end in ends]
