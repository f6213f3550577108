"""Overlap scheduling of rounds on the device: launches round n + 1 before round n is read and delivered.

    device    | round n          | round n + 1      | round n + 2
    host      launch n + 1 · wait for n · deliver n · launch n + 2 · wait for n + 1 …

The loop starts when every decoding sequence can have the same tree shape and the drafter, if there is one,
can draft on the device. The loop stops for a new sequence, another shape, a prefill, or when no page is free.
The engine enqueues the prefill before it reads the last round.

The host sees the end of a sequence one round late. The host drops the tokens of that extra round, so these
tokens are never emitted, billed or cached. The ended sequence's row stays idle until the remaining sequences
fit into the next smaller batch. The remaining sequences then move to that batch in stream order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.services.target.engine.engine_parts import EngineParts
from outrider.services.target.engine.rounds import advance
from outrider.services.target.model.input_batch import SamplingMode
from outrider.services.target.model.outcome import FAILED_TOKEN, Outcome
from outrider.services.target.model.round_runner import FinishedRound, RoundRunner
from outrider.services.target.policy.controller import ExecutedRow, ExecutedStep
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.buckets import bucket
from outrider.shared.spec.drafter import Commit, Commits, DrafterState
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CATCH_UP_TOKENS = 128
"""Number of tokens per commit that plain rounds send to a drafter that follows their sequences."""

_log = logging.getLogger("outrider.target")


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """Configures which rounds stay on the device.

    Attributes:
        batch_sizes: Sizes to pad batches to, ascending. Batches above the largest size run through the host.
        columns: Maximum number of tokens per row of a round with the default shape, which is its depth + 1.
        recorded: Largest batch whose rounds are recorded as CUDA graphs. None records all batches.
    """

    batch_sizes: tuple[int, ...]
    columns: int
    recorded: int | None = None


class DeviceLoop:
    """Launches, reads and ends the rounds on the device. Engine thread only.

    Args:
        rounds: Enqueues and reads rounds.
        batch_sizes: Sizes to pad batches to, ascending. Batches above the largest size run through the host.
        parts: The engine's parts.
    """

    def __init__(self, rounds: RoundRunner, batch_sizes: Seq[int], parts: EngineParts) -> None:
        self._rounds = rounds
        self._batch_sizes = tuple(batch_sizes)
        self._parts = parts
        self._sequences: list[Sequence | None] = []
        self._places: dict[int, int] = {}
        self._entered_len: dict[int, int] = {}
        self._shape = NO_DRAFT
        self._bs = 0

    @property
    def active(self) -> bool:
        """True if rounds are currently kept on the device."""
        return self._rounds.active

    @property
    def drafts(self) -> bool:
        """True if the current or, between batches, the last rounds on the device use drafts."""
        return self._shape.drafts

    @property
    def takes_prefilled(self) -> bool:
        """True if no remote draft takes part, so that a sequence can join right after its prefill."""
        return self._parts.drafter.device_resident or self._parts.drafter.state() is DrafterState.NONE

    @property
    def undisturbed(self) -> bool:
        """True if every decoding sequence is in this batch and no remote draft takes part.

        Prefills may then be enqueued behind the running round.
        """
        parts = self._parts
        return (
            self.takes_prefilled
            and not self._rounds.exchanges
            and parts.follower.settled
            and self._holds(parts.scheduler.decoding())
        )

    def takes(self, shape: DraftShape) -> bool:
        """Return True if rounds of this shape can stay on the device."""
        return not shape.drafts or self._parts.drafter.device_resident

    def capture(self, bs: int, shape: DraftShape, mode: SamplingMode, capture: bool) -> None:
        """Record the round of one size before the first request."""
        self._rounds.capture(bs, shape, mode, capture)

    def enter(self, decodes: Seq[Sequence]) -> bool:
        """Start rounds with these sequences. Return False if they cannot stay on the device."""
        if not decodes or len(decodes) > self._batch_sizes[-1]:
            return False
        shape = self._parts.proposals.common_shape(decodes)
        if shape is None:
            return False
        self._bs = self._bucket(len(decodes))
        if not self._rounds.enter(decodes, self._bs, shape):
            return False
        self._sequences = list(decodes)
        self._places = {sequence.session_id: row for row, sequence in enumerate(decodes)}
        self._entered_len = {sequence.session_id: sequence.committed_len for sequence in decodes}
        self._shape = shape
        if not self._launch():
            self._leave()
            return False
        self._rounds.carry()
        return True

    def step(self) -> bool:
        """Launch the next round and finish the previous round.

        Returns:
            False if no further round can be launched. The caller must then call `drain`, and may enqueue
            other work before that call.
        """
        if not (self._stays() and self._launch()):
            return False
        self._finish(self._rounds.read())
        if not self._places:
            self._leave()
        else:
            self._rounds.carry()  # last, because this call may wait: the tokens have already been passed on
        return True

    def drain(self) -> None:
        """Finish the rounds in flight and end the rounds on the device."""
        while self._rounds.in_flight and self._places:
            self._finish(self._rounds.read())
        self._leave()

    def abandon(self) -> None:
        """End the rounds after a failure that has ended all sequences. Drop the results in flight."""
        if self._rounds.active:
            try:
                self._leave()
            except Exception:
                _log.exception("the drafter could not end its rounds on the device")

    def retire(self, sequence: Sequence) -> None:
        """Remove a sequence that is about to end. Ignore sequences of other batches."""
        row = self._places.pop(sequence.session_id, None)
        if row is not None:
            self._sequences[row] = None
            self._rounds.retire(row)

    def _stays(self) -> bool:
        """Return True if the next round can have the same sequences and shape."""
        if not self._places or not self._parts.follower.settled or self._parts.scheduler.has_other_work():
            return False
        decoding = self._parts.scheduler.decoding()
        if not self._holds(decoding):
            return False
        if self._drafter_falls_behind(decoding):
            return False
        return self._parts.proposals.common_shape(decoding) == self._shape

    def _holds(self, decoding: Seq[Sequence]) -> bool:
        """Return True if the batch consists of exactly these sequences."""
        return len(decoding) == len(self._places) and all(
            sequence.session_id in self._places for sequence in decoding
        )

    def _drafter_falls_behind(self, decoding: Seq[Sequence]) -> bool:
        """Return True if the drafter lags so far behind the plain rounds that a commit should be sent."""
        if self._shape.drafts:
            return False
        return any(
            one.drafted and one.committed_len - self._entered_len[one.session_id] >= CATCH_UP_TOKENS
            for one in decoding
        )

    def _worth_another(self) -> bool:
        """Return True if a sequence may continue after the rounds in flight, at one token or more a round."""
        return any(
            sequence is not None and sequence.remaining > self._rounds.in_flight
            for sequence in self._sequences
        )

    def _launch(self) -> bool:
        """Enqueue a round unless those in flight end every sequence. Return False if no page is free."""
        if not self._worth_another():
            return True
        if not self._fits_its_bucket():
            return False
        most = (self._shape.depth + 1) * self._rounds.in_flight
        upper = [0 if one is None else min(one.committed_len + most, one.end_len) for one in self._sequences]
        uppers = [
            (sequence, bound)
            for sequence, bound in zip(self._sequences, upper, strict=True)
            if sequence is not None
        ]
        if not self._parts.scheduler.reserve_all_ahead(uppers):
            return False
        return self._rounds.launch(upper, self._wait_limit_s)

    def _fits_its_bucket(self) -> bool:
        """Move to a smaller batch if enough rows have ended. Return False if the drafter cannot move."""
        bs = self._halved()
        if bs == self._bs:
            return True
        rows = [row for row, sequence in enumerate(self._sequences) if sequence is not None]
        if not self._rounds.move(rows, bs):
            return False
        self._sequences = [self._sequences[row] for row in rows]
        self._places = {
            sequence.session_id: row for row, sequence in enumerate(self._sequences) if sequence is not None
        }
        self._bs = bs
        return True

    def _wait_limit_s(self) -> float | None:
        return self._parts.proposals.wait_limit_s(
            [sequence for sequence in self._sequences if sequence is not None]
        )

    def _finish(self, finished: FinishedRound) -> None:
        """Process a round that was read: advance the sequences, deliver tokens, and update the controller."""
        kept: list[list[int]] = [[] for _ in self._sequences]
        executed: list[ExecutedRow] = []
        before = list(self._sequences)
        for row, (sequence, outcome) in enumerate(zip(before, finished.rows, strict=True)):
            if sequence is None:
                continue
            assert outcome is not None, "a live sequence must have an outcome"
            chain = self._shape.topk == 1
            executed.append(
                ExecutedRow(
                    sequence.controller_row,
                    outcome.num_nodes,
                    self._shape.depth,
                    len(outcome.accepted),
                    chain,
                )
            )
            kept[row] = self._advance(sequence, outcome)
        if self._places:
            self._rounds.committed(
                [tokens if self._sequences[row] is not None else [] for row, tokens in enumerate(kept)]
            )
        self._parts.counter.value += 1
        self._parts.delivery.flush()
        if executed:
            step = ExecutedStep(
                executed, self._shape.depth, 0.0 if self._shape.drafts else None, 0.0, 0.0, finished.seconds
            )
            self._parts.controller.observe(step)
            self._parts.metrics.observe_device_round(step)

    def _advance(self, sequence: Sequence, outcome: Outcome) -> list[int]:
        if outcome.emitted[-1] == FAILED_TOKEN:
            self._parts.poisoned(sequence)
            return []
        had_features = sequence.has_features
        step = advance(sequence, outcome.emitted)
        if had_features:
            sequence.feature_len += len(step.kept)
        sequence.cached_len += len(step.kept)
        sequence.stats.record(outcome.num_nodes, len(outcome.accepted), step.num_cut)
        if self._parts.delivery.tokens(sequence, step, None):
            self._parts.forget(sequence)
        return step.kept

    def _leave(self) -> None:
        remaining = [sequence for sequence in self._sequences if sequence is not None]
        self._rounds.leave()
        if not self._shape.drafts:  # Plain rounds have sent no commits to the drafter.
            commits = [
                self._parts.follower.catch_up(sequence, self._entered_len[sequence.session_id])
                for sequence in remaining
            ]
            told: list[Commit] = [commit for commit in commits if commit is not None]
            if told:
                self._parts.drafter.commit(Commits(self._parts.counter.value, told))
        self._sequences, self._places, self._entered_len = [], {}, {}

    def _halved(self) -> int:
        """Halve the batch size while the remaining rows still fit, and return the result.

        Halving keeps the number of distinct sizes and of moves small.
        """
        bs = self._bs
        while len(self._places) <= (half := self._bucket(max(1, bs // 2))) < bs:
            bs = half
        return bs

    def _bucket(self, count: int) -> int:
        size = bucket(self._batch_sizes, count)
        assert size is not None, "`enter` refuses larger batches"
        return size
