"""What other threads leave for the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.target.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request; it has passed the queue's gate."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    """The end of a request; tokens after `keep_tokens` are not billed."""

    session_id: int
    keep_tokens: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    """A reader that became slow, or goes on."""

    session_id: int
    paused: bool
