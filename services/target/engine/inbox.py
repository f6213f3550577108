"""Messages from other threads to the engine thread: submit, cancel, pause, resume, and flush the cache."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from outrider.services.target.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request that has passed the queue gate."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request. The request is not billed for tokens after `keep_tokens`."""

    session_id: int
    keep_tokens: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    """Pauses a request whose reader became slow. If `paused` is False, resumes the request."""

    session_id: int
    paused: bool


@dataclass(frozen=True, slots=True)
class FlushPrefixes:
    """Empties the prefix cache. The result is the number of pages that were removed."""

    removed: Future[int]
