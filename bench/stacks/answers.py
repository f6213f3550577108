"""Records when the tokens of a batch arrive, and each sequence's outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.target.request import Event, EventSink, FailedEvent, FinishedEvent, TokensEvent
from outrider.shared.base.errors import OutriderError


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Timing and statistics of one sequence's answer.

    Attributes:
        arrivals: For each step that delivered tokens, the seconds from submitting the batch to that step.
        tokens: Number of tokens in the answer.
        rounds: Number of rounds that were verified after the prefill.
        draft_rounds: Number of rounds that had draft nodes.
        accept_length: Mean number of tokens per round with draft nodes, including the bonus token.
        fallback: Reason why some rounds had no draft nodes. Empty if all rounds had draft nodes.
    """

    arrivals: Sequence[float]
    tokens: int
    rounds: int
    draft_rounds: int
    accept_length: float
    fallback: str


class AnswerSink(EventSink):
    """Records the arrival times of tokens. The engine's thread calls the methods."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.started = 0.0
        self.ended = 0.0
        self.done = threading.Event()
        self.stepped = threading.Condition()
        self.error: OutriderError | None = None
        self._open = requests
        self._arrivals: dict[str, list[float]] = {}
        self._finished: dict[str, FinishedEvent] = {}

    def deliver(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        with self.stepped:
            for event in events:
                if isinstance(event, TokensEvent):
                    self._arrivals.setdefault(event.request_id, []).append(now)
                    continue
                self._open -= 1
                if isinstance(event, FailedEvent):
                    self.error = event.error
                else:
                    self._finished[event.request_id] = event
            self.stepped.notify_all()
        if not self._open:
            self.ended = now
            self.done.set()

    @property
    def fewest_steps(self) -> int:
        """Smallest number of token deliveries of any sequence. 0 until every sequence has had a delivery."""
        return min(map(len, self._arrivals.values())) if len(self._arrivals) == self.requests else 0

    @property
    def some_ended(self) -> bool:
        """True if a sequence has finished or failed."""
        return self._open < self.requests

    def answer(self, request_id: str) -> TimedAnswer:
        """Return the outcome of a finished request."""
        finished = self._finished[request_id]
        report = finished.speculation
        drafted = sum(report.accepted_histogram) if report.draft_tokens else 0
        return TimedAnswer(
            arrivals=[at - self.started for at in self._arrivals[request_id]],
            tokens=finished.completion_tokens,
            rounds=report.rounds,
            draft_rounds=drafted,
            accept_length=report.accept_length,
            fallback=report.fallback_reason,
        )


def delivery_gaps(answers: Sequence[TimedAnswer]) -> list[float]:
    """Return the seconds between successive deliveries of tokens of each answer.

    The wait for the first token is left out, and so is the first gap, which may contain prefills.
    """
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.arrivals[1:], answer.arrivals[2:], strict=False)
    ]
    return gaps or [0.0]
